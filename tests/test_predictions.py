"""Features of a request's progress, and the predictor that learns from what the server did."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.control.policy.predictions import FEATURES, HistoricalAverage, Progress, features

THRESHOLDS = np.array([0.9, 0.8, 0.7, 0.6, 0.5])


def make_progress(confidences: list[float], **fields) -> Progress:
    values = {
        "request": 1, "steps": 4, "num_unmasked": len(confidences), "block": 1, "num_unmasked_in_block": 2,
        "output_length": 64, "block_length": 8, "prompt_length": 20, "num_masks_before_end": 16,
        "hidden": (1.5, 2.0),
    }  # fmt: skip
    return Progress(**(values | fields), confidences=array("f", confidences))


def test_the_features_are_those_of_the_paper_and_four_of_our_own() -> None:
    [row] = features([make_progress([0.5, 0.9, 1.0, 0.8])])
    assert dict(zip(FEATURES, row.tolist(), strict=True)) == pytest.approx(
        {
            "step": 5 / 64, "unmasked": 4 / 64, "block": 1 / 8, "unmasked_in_block": 2 / 8,
            "output_length": 64, "confidence_min": 0.5, "confidence_q25": 0.725,
            "confidence_median": 0.85, "confidence_mean": 0.8, "confidence_q75": 0.925,
            "prompt_length": 20, "masks_before_end": 16 / 64, "hidden_blocks": 1.5, "hidden_steps": 2.0,
        }
    )  # fmt: skip


@given(st.lists(st.lists(st.floats(0, 1, width=32), max_size=30), min_size=1, max_size=5))
def test_each_request_has_the_quantiles_of_its_own_confidences(rows: list[list[float]]) -> None:
    table = features([make_progress(row) for row in rows])
    for values, row in zip(table[:, 5:10], rows, strict=True):
        if row:
            quantiles = np.quantile(row, [0, 0.25, 0.5, 0.75])
            np.testing.assert_allclose(values[[0, 1, 2, 4]], quantiles, atol=1e-12)
            assert values[3] == pytest.approx(np.mean(row))
        else:
            assert not values.any()


def test_at_first_the_published_figures_hold() -> None:
    table = features([make_progress([], output_length=256, steps=0)])
    predicted = HistoricalAverage().predict(table, THRESHOLDS)
    np.testing.assert_allclose(predicted, [256 / np.array([3.02, 3.89, 4.77, 5.65, 6.58])])


def test_it_learns_the_speed_of_a_threshold_and_shifts_the_unused_ones_along() -> None:
    average = HistoricalAverage()
    for _ in range(5000):
        average.observe_steps(0.9, 1, 6)
    fast = average.tokens_per_step(THRESHOLDS)
    assert fast[0] == pytest.approx(6, rel=0.03)
    assert fast[4] == pytest.approx(2 * 6.58, rel=0.05)


def test_it_learns_how_early_answers_end() -> None:
    average = HistoricalAverage()
    for _ in range(300):
        average.observe_finish(0.25, 20)
    early, late = average.predict(
        features(
            [
                make_progress([], output_length=400, steps=0),
                make_progress([0.9] * 300, output_length=400, steps=100),
            ]
        ),
        THRESHOLDS,
    )
    assert early[0] == pytest.approx(100 / 3.02, rel=0.1)
    assert late[0] == pytest.approx(10 / 3.02, rel=0.1)


def test_who_was_slow_so_far_is_expected_to_stay_slow() -> None:
    rows = [make_progress([0.5] * 60, output_length=256, steps=steps) for steps in (10, 19, 60)]
    fast, usual, slow = HistoricalAverage().predict(features(rows), THRESHOLDS)[:, 0]
    assert fast == usual == pytest.approx(196 / 3.02)
    assert slow == pytest.approx(196 * 68 / (60 + 8 * 3.02))


@given(st.lists(st.tuples(st.sampled_from([0.3, 0.5, 0.9, 0.95]), st.integers(1, 32)), max_size=40))
def test_predictions_are_positive_and_finite_whatever_was_seen(steps: list[tuple[float, int]]) -> None:
    average = HistoricalAverage()
    for threshold, tokens in steps:
        average.observe_steps(threshold, 1, tokens)
        average.observe_finish(1 / tokens, 1)
    predicted = average.predict(features([make_progress([0.5] * 64), make_progress([])]), THRESHOLDS)
    assert np.isfinite(predicted).all() and (predicted >= 1).all()


@pytest.mark.parametrize("share_used", [1.0, 0.4, 0.01])
@pytest.mark.parametrize("output_length", [1, 32, 300])
def test_a_new_request_is_one_with_nothing_done(share_used: float, output_length: int) -> None:
    history, thresholds = HistoricalAverage(), np.array([0.9, 0.7, 0.5])
    for _ in range(200):
        history.observe_finish(share_used, num_steps=40)
    history.observe_steps(0.9, num_steps=500, num_unmasked=1300)
    nothing = np.zeros(1)
    [usual] = history.steps_left(np.array([float(output_length)]), nothing, nothing, thresholds)
    assert history.steps_of_new(output_length, thresholds).tolist() == usual.tolist()
