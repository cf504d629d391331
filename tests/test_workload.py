"""The workload monitor: rates and lengths by bin over a sliding window, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.control.policy.workload import MAX_CLASSES, NUM_SLICES, WorkloadMonitor

arrivals = st.lists(
    st.tuples(st.floats(0, 300), st.integers(1, 9000), st.integers(1, 5000), st.none() | st.floats(0.1, 90)),
    max_size=60,
)


def test_classes_are_bins_with_their_means() -> None:
    monitor = WorkloadMonitor(window_s=10.0)
    for at, prompt, output, slo_s in ((0.0, 10, 96, 2.0), (1.0, 30, 32, 4.0), (2.0, 300, 256, None)):
        monitor.arrived(at, prompt, output, slo_s)
    short, long = monitor.classes(2.0)
    assert (short.prompt, short.output, short.slo_s) == (20.0, 64.0, 3.0)
    assert (long.prompt, long.output, long.slo_s) == (300.0, 256.0, None)
    assert short.rps == pytest.approx(1.0) and long.rps == pytest.approx(0.5)


def test_what_is_older_than_the_window_does_not_count() -> None:
    monitor = WorkloadMonitor(window_s=10.0)
    for second in range(30):
        monitor.arrived(float(second), 10 if second < 15 else 1000, 32, None)
    [only] = monitor.classes(30.0)
    assert only.prompt == 1000.0
    assert only.rps == pytest.approx(1.0, rel=0.15)
    assert monitor.classes(100.0) == []


@given(arrivals)
def test_no_arrival_is_lost_and_classes_stay_few(load: list) -> None:
    monitor = WorkloadMonitor(window_s=1e6)
    for at, prompt, output, slo_s in sorted(load, key=lambda each: each[0]):
        monitor.arrived(at, prompt, output, slo_s)
    classes = monitor.classes(300.0)
    assert len(classes) <= MAX_CLASSES
    assert sum(each.rps for each in classes) * 1e6 / NUM_SLICES == pytest.approx(len(load))
    tokens = sum(each.rps * (each.prompt + each.output) for each in classes) * 1e6 / NUM_SLICES
    assert tokens == pytest.approx(sum(prompt + output for _, prompt, output, _ in load))


def arrive_at_rates(rates: list[int]) -> WorkloadMonitor:
    """Evenly, so many in each of the window's ten seconds."""
    monitor = WorkloadMonitor(window_s=10.0)
    for second, rate in enumerate(rates):
        for i in range(rate):
            monitor.arrived(second + i / rate, 10, 32, None)
    return monitor


@pytest.mark.parametrize(
    ("rates", "trend"),
    [
        ([20] * 10, 1.0),
        ([20] * 8 + [60] * 2, 60 / (260 / 9)),
        ([60] * 8 + [20] * 2, 20 / (460 / 9)),
        ([20] * 8 + [25] * 2, 1.0),  # may be chance
        ([1] * 8 + [2] * 2, 1.0),
        ([], 1.0),
    ],
)
def test_a_rate_that_has_changed_is_told_from_chance(rates: list[int], trend: float) -> None:
    assert arrive_at_rates(rates).trend(10.0) == pytest.approx(trend, rel=0.02)


def test_there_is_no_trend_before_the_window_has_a_past() -> None:
    assert arrive_at_rates([50, 80]).trend(2.0) == 1.0


def test_memory_does_not_grow_with_the_rate() -> None:
    monitor = WorkloadMonitor(window_s=10.0)
    for i in range(5000):
        monitor.arrived(i * 0.01, i % 3000, i % 900 + 1, 1.0)
    assert len(monitor._slices) <= NUM_SLICES + 1
