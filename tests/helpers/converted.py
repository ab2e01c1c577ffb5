"""A helper that lists the blocks of a model that `coat.fp8` has converted."""

import coat_jax as coat


def converted(fn, *args) -> set[str]:
    """Returns the names of the blocks with FP8 matmuls in a converted model.

    Asserts that the model saves FP8 residuals, and that all its blocks are called.
    """
    report = coat.fp8_report(fn, *args)
    assert "float8" in str(coat.residual_report(fn, *args)), report
    assert report.called == report.blocks
    return {row.block for row in report.rows if row.converted}
