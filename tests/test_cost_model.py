"""The cost model against the published table, and its correction by what steps really take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.control.policy.cost_model import MEASURED_MS, MEASURED_TOKENS, CostModel
from dlmserve.errors import ConfigError

# The published fit of the measurements, in ms: max(c, a + b n + q n^2).
FIT_MS = {
    1: (12.35, 4.17, 0.02433, 7.894e-7),
    2: (12.12, 5.72, 0.02119, 2.753e-7),
    4: (12.82, 5.87, 0.01267, 1.447e-7),
}


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_preset_gives_the_measured_table(degree: int) -> None:
    model = CostModel.from_preset("h100-measured")
    seconds = [1000 * model.step_s(degree, tokens) for tokens in MEASURED_TOKENS]
    assert seconds == pytest.approx(MEASURED_MS[degree], rel=0.03)  # made monotone: at most 0.2 ms off


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_between_the_measurements_the_preset_follows_the_published_fit(degree: int) -> None:
    model = CostModel.from_preset("h100-measured")
    c, a, b, q = FIT_MS[degree]
    tokens = np.array([64.0, 700, 900, 1200, 1800, 2500, 3500, 5000, 7000])
    fit = np.maximum(c, a + b * tokens + q * tokens**2)
    np.testing.assert_allclose(1000 * model.step_s_many(degree, tokens), fit, rtol=0.08)


def test_full_nvlink_makes_tensor_parallelism_pay_at_small_batches() -> None:
    measured, nvlink = map(CostModel.from_preset, ("h100-measured", "h100-nvlink"))
    assert measured.step_s(4, 64) > measured.step_s(1, 64)
    assert nvlink.step_s(4, 64) < 0.6 * nvlink.step_s(1, 64)


@given(st.floats(1, 20000), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["h100-measured", "h100-nvlink"]))
def test_one_batch_and_many_agree_and_more_tokens_never_cost_less(n: float, degree: int, name: str) -> None:
    model = CostModel.from_preset(name)
    pair = model.step_s_many(degree, np.array([n, 1.5 * n]))
    assert pair[0] == pytest.approx(model.step_s(degree, n))
    assert pair[1] >= pair[0] > 0
    fixed_s, per_token_s = model.line(degree, n)
    assert fixed_s + per_token_s * n == pytest.approx(model.step_s(degree, n))


@given(seconds=st.floats(1e-4, 10.0), degree=st.sampled_from([1, 2, 4]))
def test_the_largest_batch_within_a_time_takes_that_time(seconds: float, degree: int) -> None:
    costs = CostModel.from_preset("h100-measured")
    tokens = costs.tokens_within(degree, seconds)
    if 0 < tokens < MEASURED_TOKENS[-1]:
        assert costs.step_s(degree, tokens) == pytest.approx(seconds)
    elif tokens == 0:
        assert costs.step_s(degree, MEASURED_TOKENS[0]) > seconds
    else:
        assert costs.step_s(degree, tokens) <= seconds


def test_reports_teach_it_the_overhead_of_each_step() -> None:
    model, truth = CostModel.from_preset("h100-measured"), CostModel.from_preset("h100-measured")
    for i in range(200):
        tokens = (64, 400, 900, 2200)[i % 4]
        model.observe(1, tokens, 8, truth.step_s(1, tokens) + 0.0098)
    for tokens in (64, 1000, 4000):
        assert model.step_s(1, tokens) == pytest.approx(truth.step_s(1, tokens) + 0.0098, rel=0.02)
    assert model.step_s(2, 900) == truth.step_s(2, 900)


def test_reports_of_a_machine_of_another_speed_override_the_preset() -> None:
    model, preset = CostModel.from_preset("h100-measured"), CostModel.from_preset("h100-measured")
    for i in range(300):
        tokens = (64, 400, 900, 2200)[i % 4]
        model.observe(8, tokens, 8, 0.2 * preset.step_s(4, tokens))
    assert model.step_s(8, 1500) == pytest.approx(0.2 * preset.step_s(4, 1500), rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(1e-5, 2.0)), max_size=50))
def test_whatever_is_reported_steps_keep_taking_time(reports: list[tuple[int, float]]) -> None:
    model = CostModel.from_preset("h100-measured")
    for tokens, duration_s in reports:
        model.observe(1, tokens, 1, duration_s)
    seconds = model.step_s_many(1, np.array([1, 100, 1000, 10000]))
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all()


def test_a_profile_is_read_and_a_useless_one_refused() -> None:
    model = CostModel.from_profile({"source": "test", "step_s": {"1": [[10, 1, 0.1], [20, 1, 0.3]]}})
    assert model.step_s(1, 15) == pytest.approx(0.2)
    assert model.step_s(4, 30) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="TP degree 1 has 1 batch sizes"):
        CostModel.from_profile({"source": "test", "step_s": {"1": [[10, 1, 0.1]]}})
    with pytest.raises(ConfigError, match="wanted one of: h100-measured, h100-nvlink"):
        CostModel.from_preset("h200")


def test_what_is_believed_by_now_can_be_written_down_and_read_again() -> None:
    costs = CostModel.from_profile(
        {
            "source": "here",
            "step_s": {"1": [[32, 1, 0.003], [160, 1, 0.008], [320, 4, 0.02], [2560, 16, 0.2]]},
        }
    )
    for _ in range(50):
        costs.observe(1, 320, 4, 0.03)
    again = CostModel.from_profile(costs.profile())
    assert again.source == "here, corrected by reports"
    for tokens, requests in ((32, 1), (160, 1), (320, 4), (1000, 5), (2560, 16)):
        assert again.step_s(1, tokens, requests) == pytest.approx(costs.step_s(1, tokens, requests), rel=0.02)
    assert again.step_s(1, 320, 4) > 0.025, "the reports count"
