"""Stage 1 of the planner: what it promises can be carried out, and it follows the load as it should."""

import numpy as np
import pytest
from msgspec.structs import replace

from dlmserve.control.planning.block_form import assess, solve
from dlmserve.control.planning.block_times import LOAD_LIMIT, SLO_SHARE, BlockTimes
from dlmserve.control.planning.paper_form import solve_paper
from dlmserve.control.policy.plan import (
    Outcome,
    Plan,
    RequestClass,
    counts_of,
    fill,
    is_worthwhile,
    packs,
    tp_layout,
)
from dlmserve.errors import NoPlan
from tests.planning_data import GSM8K, TOKENS_PER_STEP, make_problem

SATURATING = 40.0  # requests a second on eight GPUs


def num_gpus(counts: dict[int, int]) -> int:
    return sum(tp_layout(counts))


def test_few_large_instances_at_low_load_and_many_small_ones_at_high_load() -> None:
    plans = [solve(make_problem(rps)) for rps in (0.5, 15.0, 19.0)]
    assert [plan.status for plan in plans] == ["optimal"] * 3
    assert plans[0].needed.keys() == {4}
    degrees = [np.average(tp_layout(plan.layout)) for plan in plans]
    assert degrees == sorted(degrees, reverse=True) and degrees[0] > degrees[-1]
    assert num_gpus(plans[0].needed) < num_gpus(plans[1].needed) <= num_gpus(plans[2].needed) <= 8


def test_the_threshold_is_held_as_long_as_the_gpus_do() -> None:
    found = [solve(make_problem(rps)).outcome for rps in (5.0, 19.0, 21.5)]
    thresholds = [outcome.mean_threshold for outcome in found if outcome]
    assert thresholds[:2] == pytest.approx([0.9, 0.9], abs=2e-3)
    assert 0.5 < thresholds[2] < 0.88


def test_a_plan_keeps_its_limits() -> None:
    plan = solve(make_problem(19.0))
    outcome = plan.outcome
    assert outcome
    assert all(outcome.busy[d] <= LOAD_LIMIT * plan.needed[d] + 1e-3 for d in outcome.busy)
    assert outcome.latency_s <= SLO_SHARE * 9.5 + 1e-3
    assert sum(outcome.threshold_mix) == pytest.approx(1.0)
    assert sum(outcome.degree_mix.values()) == pytest.approx(1.0, abs=1e-4)


def test_too_much_load_means_the_smallest_instances_and_names_the_gpus() -> None:
    plan = solve(make_problem(SATURATING))
    assert (plan.status, plan.layout, plan.outcome) == ("infeasible", {1: 8}, None)
    assert plan.reason.startswith("GPUs: the load takes") and plan.reason.endswith("there are 8")


def test_an_slo_that_nothing_meets_is_named() -> None:
    plan = solve(make_problem(1.0, slo_s=0.05))
    assert plan.status == "infeasible"
    assert "SLO: requests of 1075+256 tokens take" in plan.reason


def test_canvases_that_fit_nowhere_are_named() -> None:
    plan = solve(make_problem(1.0, kv_tokens=300))
    assert plan.status == "infeasible"
    assert plan.reason == "KV memory: requests of 1075+256 tokens; the largest instance holds 1200"


def test_a_canvas_goes_where_its_keys_and_values_fit() -> None:
    plan = solve(make_problem(0.5, kv_tokens=700, preset="h100-measured"))
    assert plan.outcome and 1 not in plan.outcome.degree_mix


def test_tighter_slos_cost_gpus() -> None:
    loose, tight = solve(make_problem(8.0, slo_s=None)), solve(make_problem(8.0, slo_s=0.9))
    assert loose.outcome and tight.outcome
    assert tight.outcome.latency_s <= SLO_SHARE * 0.9 + 1e-3
    assert tight.outcome.mean_threshold <= loose.outcome.mean_threshold + 1e-3


def test_nodes_that_the_degrees_do_not_divide_are_counted_one_by_one() -> None:
    plan = solve(make_problem(0.5, nodes=[3, 3], degrees=(2,)))
    assert plan.layout == {2: 2}, "six GPUs, but no three instances of two"


def test_the_present_layout_is_held_against_the_plan() -> None:
    problem = make_problem(0.5, present=[1] * 8)
    plan = solve(problem)
    assert plan.outcome and plan.present
    assert plan.present.latency_s > 1.2 * plan.outcome.latency_s
    assert is_worthwhile(plan, (1,) * 8)
    assert not is_worthwhile(solve(replace(problem, present=[4, 4])), (4, 4))
    assert solve(make_problem(15.0, present=[4])).present is None, "it can't carry that"


def test_a_layout_can_be_assessed_alone() -> None:
    outcome = assess(make_problem(5.0), {2: 4})
    assert outcome and outcome.degree_mix == pytest.approx({2: 1.0})
    assert assess(make_problem(SATURATING), {2: 4}) is None


def test_blocks_take_longer_side_by_side_than_alone_but_not_as_long_as_one_by_one() -> None:
    times = BlockTimes(make_problem(1.0))
    tp1 = (times.degree == 1) & (times.level == 0)
    assert (np.diff(times.tau_s[tp1]) > 0).all()
    assert (times.tau_s[tp1] / times.concurrency[tp1])[1:].max() < times.tau_s[tp1][0]


def test_the_mean_step_counts_how_many_recompute_at_once() -> None:
    """A step of two takes 64, 32 + 1331 or 2662 tokens; each beyond 100 costs 1 s. Not L(mean)."""
    problem = replace(
        make_problem(1.0), step_s={1: [(0.0, 1.0), (100.0, 1.0), (5100.0, 5001.0)]}, tp_degrees=[1]
    )
    times = BlockTimes(problem)
    share = TOKENS_PER_STEP[0] / 32
    expected = 1 + 2 * share * (1 - share) * (1363 - 100) + share**2 * (2662 - 100)
    mode = times.modes.index((1, 0, 2))
    assert times.tau_s[mode] == pytest.approx(expected / share, rel=1e-6)


def test_a_block_causal_model_computes_the_prompt_once() -> None:
    """Eight blocks of 32: a recompute is an eighth of the prompt and two blocks, 198 tokens instead of 1331."""
    problem = replace(make_problem(1.0), step_s={1: [(0.0, 1.0), (5000.0, 5001.0)]}, tp_degrees=[1])
    whole, causal = BlockTimes(problem), BlockTimes(replace(problem, block_causal=True))
    steps = 32 / TOKENS_PER_STEP[0]
    alone = whole.modes.index((1, 0, 1))
    assert whole.tau_s[alone] == pytest.approx(steps + 1331 + (steps - 1) * 32)
    assert causal.tau_s[alone] == pytest.approx(steps + 1075 / 8 + 64 + (steps - 1) * 32)
    assert causal.fits.all() and (causal.concurrency == whole.concurrency).all(), "K/V are kept of all tokens"


def test_the_papers_form_splits_blocks_over_instances() -> None:
    """Why ours counts blocks: its latencies are lower, as it runs recomputes here and cache steps there."""
    problem = make_problem(4.0)
    theirs, ours = solve_paper(problem), solve(problem)
    assert theirs and ours.outcome
    assert theirs.status == "optimal"
    assert theirs.split > 0.2
    assert num_gpus(theirs.layout) <= 8
    assert solve_paper(make_problem(SATURATING)) is None


# ---- layouts


def test_spare_gpus_become_more_of_the_same() -> None:
    assert fill([4, 4], {4: 1}, [1, 2, 4]) == {4: 2}
    assert fill([4, 4], {2: 1, 1: 1}, [1, 2, 4]) == {2: 3, 1: 2}
    assert fill([3], {2: 1}, [1, 2]) == {1: 1, 2: 1}


def test_instances_do_not_span_nodes() -> None:
    assert packs([4, 4], {4: 1, 2: 1, 1: 2})
    assert not packs([3, 3], {2: 3})
    assert not packs([4], {8: 1})


def test_layouts_and_counts_are_the_same_thing() -> None:
    assert tp_layout({1: 2, 4: 1}) == (4, 1, 1)
    assert counts_of((4, 1, 1)) == {1: 2, 4: 1}


def outcome(threshold: float, latency_s: float) -> Outcome:
    return Outcome(threshold, latency_s, {}, [], {}, {})


@pytest.mark.parametrize(
    ("planned", "present", "changes"),
    [
        (outcome(0.9, 1.0), outcome(0.9, 1.05), False),
        (outcome(0.9, 1.0), outcome(0.9, 1.2), True),
        (outcome(0.85, 1.0), outcome(0.9, 1.2), False),
        (outcome(0.9, 1.3), outcome(0.85, 1.0), True),
        (outcome(0.9, 1.0), None, True),
        (None, None, True),
    ],
)
def test_only_what_pays_is_changed(planned: Outcome | None, present: Outcome | None, changes: bool) -> None:
    plan = Plan("optimal", {4: 2}, {4: 2}, planned, present)
    assert is_worthwhile(plan, (1,) * 8) == changes
    assert not is_worthwhile(plan, (4, 4))


def test_somewhat_sooner_pays_when_it_is_wanted_twice() -> None:
    plan = Plan("optimal", {4: 2}, {4: 2}, outcome(0.9, 1.0), outcome(0.9, 1.05))
    assert not is_worthwhile(plan, (1,) * 8)
    assert is_worthwhile(plan, (1,) * 8, before=plan)
    assert not is_worthwhile(plan, (1,) * 8, before=replace(plan, layout={2: 4}))
    hardly = replace(plan, present=outcome(0.9, 1.01))
    assert not is_worthwhile(hardly, (1,) * 8, before=hardly)


def test_a_mix_of_classes_meets_each_ones_slo() -> None:
    short, long = RequestClass(64.0, 64.0, 10.0, 1.0), RequestClass(*GSM8K, 2.0, 6.0)
    plan = solve(make_problem(0.0, classes=[short, long]))
    assert plan.outcome and plan.status == "optimal"
    alone = assess(make_problem(0.0, classes=[long]), plan.layout)
    assert alone and alone.latency_s <= SLO_SHARE * 6.0 + 1e-3


def test_running_out_of_time_is_not_taken_for_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlmserve.control.planning.solver.MAX_VIOLATION", -1.0)  # no answer is good enough
    with pytest.raises(NoPlan, match="no answer within"):
        solve(make_problem(5.0))
