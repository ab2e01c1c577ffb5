"""Groups of rows, and their transposed copies, in NumPy."""

import numpy as np


def slices(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def padded(x, sizes):
    """Transposes groups of rows, and pads each group to a multiple of 128 columns."""
    blocks = [np.zeros((x.shape[1], 0), x.dtype)]
    for rows in slices(sizes):
        columns = x[rows].T
        blocks.append(np.pad(columns, ((0, 0), (0, -columns.shape[1] % 128))))
    y = np.concatenate(blocks, axis=1)
    total = (len(x) + 127 * len(sizes)) // 128 * 128
    return np.pad(y, ((0, 0), (0, total - y.shape[1])))
