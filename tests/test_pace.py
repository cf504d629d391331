"""The pace: what varying batches cost beyond the mean batch, learnt from the steps of each TP degree."""

import numpy as np
import pytest

from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.pace import Pace

COSTS = CostModel.from_profile(
    {
        "source": "test",
        "step_s": {degree: [[1, 1, 0.01], [256, 1, 0.01], [4352, 1, 0.11]] for degree in ("1", "2")},
    }
)


def play(pace: Pace, batches: dict[int, list[float]], num_rounds: int, degrees: list[int]) -> None:
    """Each round, every slot's instance makes one step of each of its batches; their mean was expected."""
    mean = np.array([np.mean(batches[slot]) for slot in sorted(batches)])
    for _ in range(num_rounds):
        pace.expect(degrees, mean, COSTS)
        for slot, sizes in batches.items():
            for size in sizes:
                pace.stepped(slot, COSTS.step_s(degrees[slot], size))


def test_it_is_one_before_anything_was_seen_and_where_batches_do_not_vary() -> None:
    pace = Pace()
    assert pace.ratio(1) == 1.0
    play(pace, {0: [1000.0] * 4}, 500, [1])
    assert pace.ratio(1) == pytest.approx(1.0)


def test_batches_that_vary_take_longer_than_their_mean() -> None:
    pace = Pace()
    sizes = [192.0, 192.0, 192.0, 1491.0]
    play(pace, {0: sizes}, 2000, [1])
    mean_s = np.mean([COSTS.step_s(1, size) for size in sizes])
    wanted = mean_s / COSTS.step_s(1, float(np.mean(sizes)))
    assert wanted > 1.05
    assert pace.ratio(1) == pytest.approx(wanted, rel=0.02)


def test_each_tp_degree_has_its_own() -> None:
    pace = Pace()
    play(pace, {0: [500.0, 500.0], 1: [1.0, 1001.0]}, 2000, [1, 2])
    assert pace.ratio(1) == pytest.approx(1.0)
    assert pace.ratio(2) > 1.1
    assert pace.ratios([2, 1, 2]).tolist() == [pace.ratio(2), pace.ratio(1), pace.ratio(2)]


def test_steps_that_nobody_expected_teach_nothing() -> None:
    pace = Pace()
    pace.stepped(0, 100.0)
    pace.expect([1], np.array([0.0]), COSTS)
    pace.stepped(0, 100.0)
    pace.expect([1], np.array([500.0]), COSTS)
    assert pace.ratio(1) == 1.0
