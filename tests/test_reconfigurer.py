"""Reconfiguration: when the planner is asked, with which question, and what becomes of its answer."""

import pytest

from dlmserve.control.policy.events import DissolveInstance, FormInstance, MakePlan, Planned, RankLeft, Tick
from dlmserve.control.policy.plan import Outcome, Plan, Problem
from dlmserve.messages import Decoding
from tests.story import BLOCK, PAGE, Story, make_spec, make_step

TP1, TP2 = {1: 2}, {2: 1}


def asked(actions: list) -> Problem | None:
    return next((action.problem for action in actions if isinstance(action, MakePlan)), None)


def outcome(latency_s: float) -> Outcome:
    return Outcome(0.9, latency_s, {}, [], {}, {})


def serving(layout: tuple[int, ...] = (1, 1), **settings) -> Story:
    story = Story(tp_layout=layout, reconfigure_every_s=60.0, workload_window_s=100.0, **settings)
    story.serve(num_pages=8)
    story.at(0.0, Tick())
    return story


def test_the_planner_is_asked_once_a_period_about_what_came() -> None:
    story = serving()
    story.arrive(10.0, 1, make_spec(3, slo_s=2.0))
    story.arrive(20.0, 2, make_spec(1, slo_s=4.0))
    assert asked(story.at(59.0, Tick())) is None
    problem = asked(story.at(60.0, Tick()))
    assert problem is not None
    [only] = problem.classes
    assert (only.prompt, only.output, only.slo_s) == (PAGE, 2 * BLOCK, 3.0)
    assert only.rps == pytest.approx(2 / 50)
    assert (problem.nodes, problem.present, problem.kv_tokens) == ([2], [1, 1], 8 * PAGE)
    assert problem.tp_degrees == [1, 2], "no instance of four fits on two devices"
    assert problem.block_length == BLOCK
    assert asked(story.at(119.0, Tick())) is None
    story.arrive(119.0, 3)
    assert asked(story.at(120.0, Tick())) is not None


def test_the_planner_is_told_that_a_model_is_block_causal() -> None:
    for block_causal in (False, True):
        story = serving()
        story.arrive(10.0, 1, make_spec(3, decoding=Decoding(block_length=BLOCK, block_causal=block_causal)))
        problem = asked(story.at(60.0, Tick()))
        assert problem and problem.block_causal == block_causal


def test_without_load_there_is_nothing_to_ask() -> None:
    story = serving()
    assert asked(story.at(60.0, Tick())) is None
    story.arrive(100.0, 1)
    assert asked(story.at(100.5, Tick())) is not None


def test_off_means_never() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    story.arrive(1.0, 1)
    assert asked(story.at(10_000.0, Tick())) is None


def test_falling_caps_ask_sooner() -> None:
    story = serving()
    story.arrive(1.0, 1)
    rows = story.scheduler.steering.view.work.rows()
    rows["cap"][:] = 2
    assert asked(story.at(11.0, Tick())) is None
    assert asked(story.at(12.0, Tick())) is not None


def test_a_plan_that_pays_is_carried_out_and_the_request_goes_on() -> None:
    story = serving()
    story.arrive(1.0, 1, make_spec(2))
    story.at(60.0, Tick())
    actions = story.at(61.0, Planned(Plan("optimal", TP2, TP2, outcome(1.0), outcome(2.0))))
    [idle] = [action.instance for action in actions if isinstance(action, DissolveInstance)]
    busy = next(name for name in ("i0.1", "i1.1") if name != idle)
    assert story.scheduler.num_reconfigurations == 1
    step = make_step(1, {4: 7, 5: 7, 6: 7, 7: 7})
    actions = story.report(62.0, busy, 1, step, released=[1])
    assert DissolveInstance in map(type, actions)
    actions = story.at(63.0, RankLeft(idle, 0, "")) + story.at(63.0, RankLeft(busy, 0, ""))
    [formed] = [action for action in actions if isinstance(action, FormInstance)]
    assert len(formed.ranks) == 2
    assert story.form(formed.instance, now=64.0)
    assert story.scheduler.requests[1].instance == formed.instance


def test_a_plan_that_does_not_pay_changes_nothing() -> None:
    story = serving()
    plan = Plan("optimal", TP2, TP2, outcome(1.0), outcome(1.05))
    assert story.at(61.0, Planned(plan)) == []
    assert story.scheduler.reconfigurer.plan == plan
    assert story.scheduler.num_reconfigurations == 0


def test_nothing_is_asked_while_a_layout_changes() -> None:
    story = serving()
    story.arrive(1.0, 1)
    story.at(30.0, Planned(Plan("optimal", TP2, TP2, outcome(1.0), outcome(2.0))))
    assert story.scheduler.transition.active
    assert asked(story.at(60.0, Tick())) is None
