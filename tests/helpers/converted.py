"""The blocks of a model that `coat.fp8` has converted."""

import coat_jax as coat


def converted(fn, *args) -> set[str]:
    """Returns the blocks with FP8 matmuls, of which FP8 copies are saved, too."""
    report = coat.fp8_report(fn, *args)
    assert "float8" in str(coat.residual_report(fn, *args)), report
    assert report.called == report.blocks
    return {row.block for row in report.rows if row.converted}
