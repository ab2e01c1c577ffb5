"""Tests of the figure moments.png."""

import numpy as np

from experiments.training import moment_plots


def test_a_history_of_moments_is_over_all_parameters():
    def row(step, size, share, error, **powers):
        shares = {"zero_share": share, "max_share": 0.0, "error": error}
        return {"step": step, "size": size} | shares | powers

    rows_of_step = [row(5, 1, 0.5, 3.0, k0=1), row(5, 3, 0.1, 1.0, k0=1, k7=6)]
    history = moment_plots.History.of([*rows_of_step, row(9, 2, 0.3, 0.5, k15=2)])
    np.testing.assert_array_equal(history.steps, [5, 9])
    np.testing.assert_allclose(history.zero_share, [0.2, 0.3])
    np.testing.assert_allclose(history.error, [np.sqrt(12 / 4), 0.5])
    np.testing.assert_allclose(history.error_range, [[1.0, 0.5], [3.0, 0.5]])
    np.testing.assert_allclose(
        history.powers[:, [0, 7, 15]], [[1 / 4, 3 / 4, 0], [0, 0, 1]]
    )
    assert history.power is None
    assert moment_plots.History.of([row(1, 1, 0.0, 0.0, k=3.0)]).power == 3.0
