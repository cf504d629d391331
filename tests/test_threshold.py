"""Algorithms 1 and 2 and our level caps: what must hold for every load."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmserve.control.policy.threshold import deadline_limits, greedy_caps, level_caps, pick

T = 5


@st.composite
def loads(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(work [n, T], falling with the index; top [n]; bottom [n])."""
    num = draw(st.integers(1, 12))
    parts = draw(st.lists(st.lists(st.integers(0, 9), min_size=T, max_size=T), min_size=num, max_size=num))
    work = 1.0 + np.cumsum(np.array(parts, dtype=float)[:, ::-1], axis=1)[:, ::-1]
    bounds = np.sort(
        np.array(draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=num, max_size=num)))
    )
    return work, bounds[:, 0], bounds[:, 1]


def chosen(work: np.ndarray, caps: np.ndarray) -> np.ndarray:
    return work[np.arange(len(work)), caps]


def plain_greedy(work: np.ndarray, top: np.ndarray, bottom: np.ndarray, supply: float) -> list[int]:
    """Algorithm 2 as the paper writes it."""
    caps, used = [], 0.0
    for r in range(len(work)):
        suffix = sum(work[j, bottom[j]] for j in range(r + 1, len(work)))
        fitting = [g for g in range(top[r], bottom[r] + 1) if used + work[r, g] + suffix <= supply]
        caps.append(fitting[0] if fitting else int(bottom[r]))
        used += work[r, caps[-1]]
    return caps


@given(loads(), st.floats(0, 400))
def test_the_vectorised_load_control_does_what_the_paper_writes(load: tuple, supply: float) -> None:
    work, top, bottom = load
    assert greedy_caps(work, top, bottom, supply).tolist() == plain_greedy(work, top, bottom, supply)


def level(work: np.ndarray, top: np.ndarray, bottom: np.ndarray, supply: float) -> np.ndarray:
    """All deadlines the same, all priorities equal."""
    same = np.zeros(len(work))
    return level_caps(work, top, bottom, same + supply, same)


@pytest.mark.parametrize("control", [greedy_caps, level])
@given(load=loads(), supply=st.floats(0, 400), more=st.floats(0, 100))
@settings(max_examples=80)
def test_caps_stay_in_bounds_and_within_the_supply(control, load: tuple, supply: float, more: float) -> None:
    work, top, bottom = load
    caps = control(work, top, bottom, supply)
    assert (top <= caps).all() and (caps <= bottom).all(), "min_threshold and pinned thresholds are respected"
    lowest = chosen(work, bottom).sum()
    if lowest <= supply:
        assert chosen(work, caps).sum() <= supply + 1e-6
    else:
        assert (caps == bottom).all()


@given(loads(), st.floats(0, 400), st.floats(0, 100))
def test_more_supply_never_lowers_a_level(load: tuple, supply: float, more: float) -> None:
    work, top, bottom = load
    assert (level(work, top, bottom, supply + more) <= level(work, top, bottom, supply)).all()


@given(st.integers(1, 10), st.floats(0, 100), st.floats(0, 20))
def test_more_supply_never_lowers_a_cap_of_equal_requests(num: int, supply: float, more: float) -> None:
    work = np.tile([9.0, 7.0, 5.0, 4.0, 3.0], (num, 1))
    top, bottom = np.zeros(num, dtype=int), np.full(num, 4)
    before, after = (greedy_caps(work, top, bottom, each) for each in (supply, supply + more))
    assert before.sum() >= after.sum()


@given(
    loads(),
    st.lists(st.floats(0, 200), min_size=12, max_size=12),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
)
def test_levels_keep_every_deadline_that_the_lowest_thresholds_keep(
    load: tuple, limits: list[float], priority: list[int]
) -> None:
    work, top, bottom = load
    num = len(work)
    limit, order = np.array(limits[:num]), np.argsort(limits[:num], kind="stable")
    caps = level_caps(work, top, bottom, limit, np.array(priority[:num]))
    assert (top <= caps).all() and (caps <= bottom).all()
    due_lowest = np.cumsum(chosen(work, bottom)[order]) <= limit[order]
    due = np.cumsum(chosen(work, caps)[order]) <= limit[order] + 1e-6
    assert (due | ~due_lowest).all()


def test_levels_fall_together_and_the_earliest_deadline_is_the_last_to_fall() -> None:
    work = np.tile([9.0, 8.0, 7.0, 6.0, 5.0], (4, 1))
    top, bottom, equal = np.zeros(4), np.full(4, 4), np.zeros(4)
    assert level_caps(work, top, bottom, np.full(4, 36.0), equal).tolist() == [0, 0, 0, 0]
    assert level_caps(work, top, bottom, np.full(4, 30.0), equal).tolist() == [1, 1, 2, 2]
    assert greedy_caps(work, top, bottom, 30.0).tolist() == [0, 0, 2, 4]


def test_a_higher_priority_keeps_its_threshold_at_the_expense_of_the_lower() -> None:
    work = np.tile([9.0, 8.0, 7.0, 6.0, 5.0], (3, 1))
    caps = level_caps(work, np.zeros(3), np.full(3, 4), np.full(3, 20.0), np.array([0, 1, 0]))
    assert caps.tolist() == [3, 0, 4]


def test_a_deadline_that_is_lost_keeps_nobody_else_down() -> None:
    work = np.tile([9.0, 8.0, 7.0, 6.0, 5.0], (2, 1))
    caps = level_caps(work, np.zeros(2), np.full(2, 4), np.array([1.0, 100.0]), np.zeros(2))
    assert caps.tolist() == [4, 0]


def test_no_limit_comes_from_requests_without_a_deadline_or_without_hope() -> None:
    slack = np.array([4.0, np.inf, 0.5])
    limits = deadline_limits(slack, np.array([True, True, False]), rate=2.0)
    assert limits.tolist() == [8.0, 8.0, 8.0]
    assert deadline_limits(np.array([0.5, np.inf]), np.array([False, True]), rate=2.0).tolist() == [0.0, 0.0]
    assert np.isinf(deadline_limits(np.array([np.inf]), np.array([True]), rate=2.0)).all()


def test_a_request_gets_the_highest_threshold_under_its_cap_that_ends_in_time() -> None:
    time_s = np.tile([10.0, 8.0, 6.0, 5.0, 4.0], (6, 1))
    slack = np.array([20.0, 8.0, 20.0, 1.0, 20.0, 20.0])
    top = np.array([0, 0, 2, 0, 0, 3])
    bottom = np.array([4, 4, 4, 4, 4, 3])
    savable = np.array([True, True, True, True, False, True])
    assert pick(time_s, slack, top, bottom, savable).tolist() == [0, 1, 2, 4, 4, 3]
