"""The simulator: the same run twice, nobody lost, every token once, and the measured figures it stands on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.cli import main
from dlmserve.control.policy.events import Deliver
from dlmserve.control.policy.policies import POLICIES
from dlmserve.messages import Admit, Decoding
from dlmserve.simulate import make_config
from dlmserve.simulation import unmasking
from dlmserve.simulation.instance import MASK, TEXT, SimulatedEngine
from dlmserve.simulation.results import Ledger, QualityProxy
from dlmserve.simulation.scenarios import Scenario, get_scenario
from dlmserve.simulation.step_traces import Oracle
from dlmserve.simulation.unmasking import (
    NUM_NOISE_ROWS,
    Unmasking,
    compiled,
    fit,
    load_calibration,
    read_table,
)
from dlmserve.simulation.workloads import Job
from dlmserve.simulator import Simulator

UNMASKING = Unmasking(load_calibration(), seed=0)
SMALL = replace(
    get_scenario("gsm8k-4gpu"), num_requests=30, prompt=200, output=96, layout=(1, 2), rps=12.0, slo_s=4.0
)


def run(scenario: Scenario, policy: str = "infaas", seed: int = 0, **settings) -> Ledger:
    return Simulator(make_config(scenario, policy, **settings), scenario, seed, "average").run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_decides_everything(policy: str) -> None:
    first, second = run(SMALL, policy), run(SMALL, policy)
    assert first.result() == second.result()
    assert first.outcomes == second.outcomes
    assert run(SMALL, policy, seed=1).outcomes != first.outcomes


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_and_every_token_is_unmasked_once(policy: str) -> None:
    simulator = Simulator(make_config(SMALL, policy), SMALL, 0, "average")
    unmasked: dict[int, list[int]] = {}
    perform = simulator._perform

    def watch(actions: list) -> None:
        for action in actions:
            if isinstance(action, Deliver):
                unmasked.setdefault(action.request, []).extend(
                    each.position for each in action.update.unmasked
                )
        perform(actions)

    simulator._perform = watch
    result = simulator.run().result()
    assert result["requests"] == SMALL.num_requests
    served = [sorted(positions) for positions in unmasked.values() if len(positions) == SMALL.output]
    assert len(served) == SMALL.num_requests - result["dropped"] == len(unmasked)
    assert all(positions == list(range(200, 296)) for positions in served)
    assert not simulator._scheduler.requests


def test_who_waits_beyond_the_slo_is_dropped_and_counts_as_violated() -> None:
    flood = replace(SMALL, rps=200.0, layout=(1,), slo_s=1.0)
    result = run(flood, max_resident_tokens=600).result()
    assert 0 < result["dropped"] < flood.num_requests
    assert result["attainment"] <= 1 - result["dropped"] / flood.num_requests


def test_answers_that_end_early_cost_fewer_steps() -> None:
    early = run(replace(SMALL, early_answers=True)).result()
    full = run(SMALL).result()
    assert early["latency_s"]["mean"] < 0.9 * full["latency_s"]["mean"]


# ---- unmasking


def course(
    unmasking: Unmasking, number: int, threshold: float, output: int = 256, others: int = 0
) -> list[list[int]]:
    """Positions of each step of one request, with `others` in the batch."""
    engine = SimulatedEngine(unmasking, 10_000, 32, {})
    for request in [number, *range(1000, 1000 + others)]:
        decoding = Decoding(value=threshold if request == number else 0.7)
        engine.apply(Admit(request, [TEXT] + [MASK] * output, 1, output + 1, output + 1, decoding))
    steps = []
    while True:
        step = next((s for s in engine.step().requests if s.request == number), None)
        if step is None:
            return steps
        steps.append(step.positions)
        if step.finished:
            return steps


@pytest.mark.parametrize("text, column", [("gsm8k", "tokens_per_step_dual_cache")])
def test_tokens_per_step_are_the_measured_ones(text: str, column: str) -> None:
    """300 requests: the spread from request to request leaves 2.5% of sampling error."""
    for threshold, measured in read_table(column).items():
        engine = SimulatedEngine(Unmasking(load_calibration(text), seed=5), 10_000, 32, {})
        for request in range(300):
            engine.apply(Admit(request, [TEXT] + [MASK] * 256, 1, 257, 257, Decoding(value=threshold)))
        num_steps = 0
        while engine.has_work():
            num_steps += len(engine.step().requests)
        assert 300 * 256 / num_steps == pytest.approx(measured, rel=0.05)


def test_a_requests_course_depends_on_its_threshold_only() -> None:
    unmasking = Unmasking(load_calibration(), seed=0)
    alone = course(unmasking, 3, 0.9)
    assert course(unmasking, 3, 0.9, others=5) == alone
    assert len(course(unmasking, 3, 0.5)) < len(alone)
    assert course(Unmasking(load_calibration(), seed=1), 3, 0.9) != alone


def test_a_block_that_goes_on_elsewhere_keeps_its_course() -> None:
    unmasking, whole = Unmasking(load_calibration(), seed=0), (1 << 32) - 1
    stays = [unmasking.begin_block(number, 1, whole, 0.9) for number in range(4)]
    for _ in range(3):
        for block in stays:
            block.step()
    moved = [unmasking.begin_block(number, 1, stays[number].masked, 0.9, 3) for number in range(4)]
    assert all(block.masked for block in stays), "there is something left to compare"
    for block, other in zip(stays, moved, strict=True):
        while block.masked:
            assert block.step() == other.step()
            assert block.masked == other.masked


def test_a_threshold_that_changes_counts_for_the_next_step() -> None:
    unmasking, whole = Unmasking(load_calibration(), seed=0), (1 << 32) - 1
    block = unmasking.begin_block(1, 0, whole, 0.9)
    block.set_threshold(0.5)
    assert block.step() == unmasking.begin_block(1, 0, whole, 0.5).step()


@pytest.mark.skipif(compiled is None, reason="csrc/next_step.c was not built")
@given(
    rows=st.tuples(*[st.integers(0, NUM_NOISE_ROWS - 1)] * 2),
    masked=st.integers(1, (1 << 32) - 1),
    ease=st.floats(-3, 3, width=32),
    threshold=st.sampled_from([1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.01]),
)
def test_the_compiled_step_is_that_of_numpy(
    rows: tuple[int, int], masked: int, ease: float, threshold: float
) -> None:
    args = (*rows, masked, ease, UNMASKING.cut(threshold))
    positions, confidences, left = UNMASKING.next_step(*args)
    assert_same((positions, confidences, left), UNMASKING.next_step_in_numpy(*args))
    assert positions and left == masked & ~sum(1 << position for position in positions)


def assert_same(step: tuple, wanted: tuple) -> None:
    assert (step[0], step[2]) == (wanted[0], wanted[2])
    assert step[1] == pytest.approx(wanted[1], rel=1e-12)


def test_a_block_of_another_length_has_the_same_steps_compiled_and_in_numpy() -> None:
    unmasking = Unmasking(fit({0.9: 2.0, 0.5: 4.0}, block_length=8), seed=3)
    block = unmasking.begin_block(5, 0, 0b10110101, 0.9)
    while block.masked:
        wanted = unmasking.next_step_in_numpy(
            block.own_row, block.noise_row, block.masked, block.ease, block.cut
        )
        assert_same((*block.step(), block.masked), wanted)


@pytest.mark.skipif(compiled is None, reason="csrc/next_step.c was not built")
def test_the_compiled_step_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="masked is 0; wanted a bit or more of the block's 32"):
        UNMASKING.next_step(0, 0, 0, 0.0, 0.0)
    with pytest.raises(ValueError, match="masked is 256; wanted a bit or more of the block's 8"):
        Unmasking(fit({0.9: 2.0, 0.5: 4.0}, block_length=8), seed=3).next_step(0, 0, 256, 0.0, 0.0)
    with pytest.raises(ValueError, match="masked is 4294967297"):
        UNMASKING.next_step(0, 0, 1 << 32 | 1, 0.0, 0.0)
    with pytest.raises(ValueError, match="rows 0 and 16381 of noise; there are 16381"):
        UNMASKING.next_step(0, NUM_NOISE_ROWS, 1, 0.0, 0.0)
    with pytest.raises(ValueError, match="blocks of 33 tokens"):
        compiled.tables(1, 33, 2, *[0] * 6)
    with pytest.raises(TypeError):
        UNMASKING.next_step(0, 0, "1", 0.0, 0.0)


def test_tokens_pass_the_threshold_or_are_the_best_alone() -> None:
    engine = SimulatedEngine(Unmasking(load_calibration(), seed=0), 100, 32, {})
    engine.apply(Admit(0, [TEXT] + [MASK] * 64, 1, 65, 65, Decoding(value=0.8)))
    while engine.has_work():
        (step,) = engine.step().requests
        assert len(step.confidences) == 1 or min(step.confidences) >= 0.8 - 1e-6


def test_another_models_table_can_be_fitted() -> None:
    calibration = fit({0.9: 2.0, 0.5: 4.0}, block_length=8)
    num_steps = sum(len(course(Unmasking(calibration, seed=0), i, 0.9, output=8)) for i in range(200))
    assert 200 * 8 / num_steps == pytest.approx(2.0, rel=0.1)


def test_the_oracle_knows_the_steps_that_are_left() -> None:
    unmasking = Unmasking(load_calibration(), seed=0)
    oracle = Oracle(unmasking, [Job(0.0, 1, 256, 256)] * 5, (0.9, 0.5))
    for number in range(5):
        real = [len(course(unmasking, number, threshold)) for threshold in (0.9, 0.5)]
        assert oracle.course(number).sum(0).tolist() == real


# ---- quality and workloads


def test_quality_of_a_mix_of_thresholds_is_near_the_measured_one() -> None:
    """Measured: 0.9 in a share of the steps, 0.6 in the others (TeDiServe artifact)."""
    tokens, proxy = read_table("tokens_per_step_no_cache"), QualityProxy()
    for share, measured in {0.0: 71.7, 0.2: 73.0, 0.4: 73.7, 0.6: 75.7, 0.8: 76.3, 1.0: 78.6}.items():
        parts = {0.9: share * tokens[0.9], 0.6: (1 - share) * tokens[0.6]}
        worth = sum(proxy[g] * num for g, num in parts.items()) / sum(parts.values())
        assert 100 * worth == pytest.approx(measured, abs=1.05)


def test_a_day_has_the_recorded_rates_and_lengths() -> None:
    jobs = replace(get_scenario("sharegpt-16gpu"), rps=20.0, duration_s=7200.0).jobs(seed=0)
    at = np.array([job.arrived_at for job in jobs])
    assert len(jobs) == pytest.approx(63_736, rel=0.03)
    assert (at[1:] >= at[:-1]).all()
    squeezed = get_scenario("sharegpt-16gpu").jobs(seed=0)
    assert len(squeezed) == pytest.approx(63_736, rel=0.03)
    assert ((at >= 4800) & (at < 5100)).sum() == pytest.approx(20 * 300, rel=0.05), "the busiest hour"
    assert np.median([job.prompt for job in jobs]) == pytest.approx(32, rel=0.1)
    assert all(job.output % 32 == 0 for job in jobs)
    assert max(job.prompt + job.output for job in jobs) <= 4096


def test_poisson_arrivals_have_the_rate() -> None:
    jobs = replace(get_scenario("gsm8k-4gpu"), num_requests=4000, rps=8.0).jobs(seed=0)
    assert jobs[-1].arrived_at == pytest.approx(500, rel=0.05)


# ---- the command


def test_the_command_writes_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["--policy", "infaas", "--requests", "20", "--rps", "4,5", "--json", str(file)]
    assert main(["simulate", *arguments]) == 0
    results = json.loads(file.read_text(encoding="utf-8"))
    assert [result["rps"] for result in results] == [4.0, 5.0]
    assert results[0].keys() == {
        "scenario", "policy", "seed", "rps", "requests", "dropped", "attainment", "accuracy",
        "mean_threshold", "latency_s", "tokens_per_s", "migrations", "reconfigurations", "decision_us",
        "overhead_ms", "options",
    }  # fmt: skip


def test_without_the_compiled_step_a_run_is_the_same_and_says_why_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def table() -> tuple[str, str]:
        assert main(["simulate", "--policy", "infaas", "--requests", "5", "--rps", "4"]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    monkeypatch.setattr(unmasking, "compiled", None)
    out, err = table()
    monkeypatch.undo()
    assert "is not built, so runs take two to four times as long" in " ".join(err.split())
    assert table()[0] == out


@pytest.mark.parametrize(
    "arguments", [["--scenario", "moon"], ["--policy", "none"], ["--policy-option", "x=y"]]
)
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["simulate", "--requests", "1", *arguments]) == 2
    assert arguments[1] in capsys.readouterr().err
