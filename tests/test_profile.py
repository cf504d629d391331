"""Step times: measured on an engine, kept on disk, fitted, and believed by the scheduler of a live server."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve import LLM, profiles
from dlmserve.cli import main
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import RankFormed
from dlmserve.control.policy.step_times import StepTime, fit
from dlmserve.errors import ConfigError
from dlmserve.messages import Cancel, Form, ModelSpec
from dlmserve.profiles import ProfileKey
from dlmserve.worker.parallel import SOLO
from dlmserve.worker.profiler import Batch, full_grid, made_up, measure, quick_grid, step_times
from tests.story import Story

KEY = ProfileKey("/models/tiny", "auto", "a processor", "auto", threads=1, tp_degree=1)
POINTS = [(32, 1, 0.003), (64, 2, 0.005), (160, 1, 0.008), (320, 2, 0.015)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_saved_is_loaded_for_the_same_key_only(tmp_path: Path) -> None:
    assert profiles.load(KEY) is None
    path = profiles.save(KEY, POINTS, "quick")
    assert path.is_relative_to(tmp_path / "dlmserve")
    assert profiles.load(KEY) == POINTS
    assert list(path.parent.iterdir()) == [path]
    for field, other in {"threads": 2, "tp_degree": 2, "dtype": "bfloat16", "device": "other"}.items():
        assert profiles.load(ProfileKey(**(vars(KEY) | {field: other}))) is None


@pytest.mark.parametrize("content", ["", "[]", '{"step_s": 1}', '{"step_s": {"1": [[1]]}}'])
def test_a_file_that_is_no_profile_counts_as_none(content: str) -> None:
    profiles.save(KEY, POINTS, "quick").write_text(content)
    assert profiles.load(KEY) is None


def test_every_step_of_a_measured_batch_is_of_the_kinds_it_asks_for(tiny: LLM) -> None:
    grid = [Batch(2, 96, 2, mixed=False), Batch(2, 96, 2, mixed=True)]
    first, both = measure(tiny._instance, grid, tiny.info.mask_id, made_up(tiny.info, 512))
    # Two recompute steps of both (96 tokens each), two cache steps of both (32 each).
    assert [point[:2] for point in first] == [(64, 2), (192, 2)]
    # One starts alone, then every step is a recompute of one and a cache step of the other.
    assert [point[:2] for point in both] == [(32, 1), (64, 2), (96, 1), (128, 2), (192, 2)]
    assert all(seconds > 0 for *_, seconds in both)
    tiny._instance.apply(Cancel(0))
    assert not tiny._instance.step().requests, "nothing is left on the engine"
    tiny._instance.check()


def test_an_instance_measures_once_and_then_reads(tiny: LLM, tmp_path: Path) -> None:
    spec = ModelSpec(tiny.info.path, "auto", "auto", tiny.info.mask_id, list(tiny.info.eos_ids))
    form = Form("i0.1", 0, 1, [], "", spec, 64, 2, 0, 32, 60.0)
    assert step_times(form, "cpu", SOLO, tiny._instance, may_measure=False) == ([], "not measured")
    points, source = step_times(form, "cpu", SOLO, tiny._instance, may_measure=True)
    assert source.startswith("measured in") and "32 tokens" in source
    again, then = step_times(form, "cpu", SOLO, tiny._instance, may_measure=False)
    assert again == points and then.startswith(f"from {tmp_path}")


def test_all_ranks_stop_where_they_agree_to(tiny: LLM) -> None:
    answers = iter([0.0, 5.0])
    grid = quick_grid(max_len=96, max_requests=4, block_length=32)
    measured = list(
        measure(
            tiny._instance, grid, tiny.info.mask_id, made_up(tiny.info, 512), lambda _: next(answers), 2.0
        )
    )
    assert len(measured) == 1


@given(st.integers(40, 5000), st.integers(1, 64), st.sampled_from([8, 16, 32]))
def test_batches_fit_the_model(max_len: int, max_requests: int, block_length: int) -> None:
    grids = quick_grid(max_len, max_requests, block_length), full_grid([max_len], max_requests, block_length)
    for batch in [*grids[0], *grids[1]]:
        assert 1 <= batch.num_requests <= max_requests
        assert 1 <= batch.num_blocks * block_length < batch.length <= max_len


@pytest.mark.parametrize("request_s", [0.0, 0.001])
def test_the_fit_tells_the_part_of_requests_from_that_of_tokens(request_s: float) -> None:
    preset = CostModel.from_preset("h100-measured")
    points = [
        StepTime(each * count, count, preset.step_s(1, each * count) + request_s * count)
        for count in (1, 2, 4, 8, 16)
        for each in (32, 96, 160)
    ]
    found = fit(points)
    assert found.request_s == pytest.approx(request_s, abs=1e-4)
    for tokens, count, seconds in points:
        predicted = np.interp(tokens, found.tokens, found.seconds) + found.request_s * count
        assert predicted == pytest.approx(seconds, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, 9000), st.integers(1, 64), st.floats(1e-4, 5.0)), min_size=2, max_size=30
    )
)
def test_whatever_was_measured_more_tokens_never_cost_less(points: list[tuple[int, int, float]]) -> None:
    if len({tokens for tokens, _, _ in points}) < 2:
        with pytest.raises(ConfigError, match="1 batch sizes"):
            CostModel.from_profile({"source": "x", "step_s": {"1": points}})
        return
    costs = CostModel.from_profile({"source": "x", "step_s": {"1": points}})
    seconds = costs.step_s_many(1, np.array([1, 10, 100, 1000, 10000]))
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all()
    assert costs.step_s(1, 100, 8) >= costs.step_s(1, 100, 1)


def test_the_scheduler_believes_what_its_first_instance_measured() -> None:
    story = Story(tp_layout=(1, 1))
    story.start_ranks()
    costs = story.scheduler.steering.view.costs
    preset_s = costs.step_s(1, 160)
    times = tuple(StepTime(*point) for point in POINTS)
    story.at(0.0, RankFormed("i0.1", 0, 8, step_times=times))
    measured_s = costs.step_s(1, 160, 1)
    assert measured_s == pytest.approx(0.008, rel=0.02) and measured_s != preset_s
    assert costs.step_s(2, 160, 1) == measured_s, "no preset is left for the other degrees"
    slower = tuple(StepTime(n, r, 2 * s) for n, r, s in times)
    story.at(0.1, RankFormed("i1.1", 0, 8, step_times=slower))
    assert costs.step_s(1, 160, 1) == measured_s


def test_the_command_measures_prints_and_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):  # the command sets them
        monkeypatch.setenv(name, "1")
    file = tmp_path / "profile.json"
    given = ["--context", "64", "--max-num-seqs", "2", "--threads", "1", "--json", str(file)]
    assert main(["profile", *given]) == 0
    [kept] = (tmp_path / "dlmserve" / "profiles").iterdir()
    assert "TP degree 1" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["step_s"] == json.loads(kept.read_text())["step_s"]
    assert CostModel.from_profile(content).step_s(1, 64, 2) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tp-degrees", "3"], "--tp-degrees has 3; wanted 1, 2, 4 or 8"),
        (["--context", "9000"], "--context has 9000; wanted 2 to 512"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_wrong_flags_are_named(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *given]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_profile_is_what_the_simulator_goes_by(tmp_path):
    file, out = tmp_path / "profile.json", tmp_path / "out.json"
    file.write_text(json.dumps({"source": "here", "step_s": {"1": [[32, 1, 0.5], [8192, 8, 0.5]]}}))
    arguments = ["--policy", "infaas", "--rps", "0.01", "--requests", "2", "--predictor", "average"]
    assert main(["simulate", *arguments, "--profile", str(file), "--json", str(out)]) == 0
    run = json.loads(out.read_text())
    assert run["options"]["cost_model"] == "here"
    assert run["latency_s"]["p50"] > 0.5 * 8, "half a second a step, and a block takes one at least"
