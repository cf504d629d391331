"""Stories of requests: literal events, and the whole ordered log of what the scheduler wants done."""

import pytest

from dlmserve.control.policy.events import Cancelled, Deliver, Drop, Finish, FormInstance, Send
from dlmserve.control.policy.request import RequestState, StepUpdate
from dlmserve.errors import ContextTooLong, NotFinite, OutOfPages, QueueFull, WorkerError
from dlmserve.messages import Cancel, Decoding, Failure, RequestStep
from tests.story import (
    BLOCK,
    MASK,
    PAGE,
    Story,
    admit_of,
    admitted,
    error_of,
    make_admit,
    make_spec,
    make_step,
    make_summary,
    rank,
    summary_of,
)

# ---- one request


def test_a_request_arrives_runs_and_finishes() -> None:
    story, spec = Story(), make_spec(slo_s=2.0)
    story.serve()
    assert story.arrive(10.0, 1, spec) == [Send("i0.1", make_admit(1, spec))]
    assert story.report(10.5, "i0.1", 0, make_step(1, {4: 7}, recompute=True)) == [
        Deliver(1, StepUpdate(1, make_step(1, {4: 7}, recompute=True)), 0.5)
    ]
    last = make_step(1, {5: 8, 6: 8, 7: 8}, finished="length")
    assert story.report(11.0, "i0.1", 1, last) == [
        Deliver(1, StepUpdate(2, last), 1.0),
        Finish(
            1,
            "length",
            make_summary(
                steps=2, recompute_steps=1, num_unmasked=4, mean_threshold=pytest.approx(0.9), latency_s=1.0,
                slo_s=2.0, slo_met=True, instances=["i0.1"],
            ),
        ),
    ]  # fmt: skip
    assert story.scheduler.requests == {}


def test_the_mean_threshold_weighs_steps_by_their_tokens() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1)
    story.report(0.1, "i0.1", 0, make_step(1, {4: 7}, threshold=0.9))
    actions = story.report(0.2, "i0.1", 1, make_step(1, {5: 7, 6: 7, 7: 7}, threshold=0.5, finished="length"))
    assert summary_of(actions).mean_threshold == pytest.approx((0.9 + 3 * 0.5) / 4)


def test_a_fixed_schedule_has_no_mean_threshold() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1, make_spec(pinned=True, decoding=Decoding(block_length=BLOCK, rule="steps", value=4)))
    actions = story.report(0.1, "i0.1", 0, make_step(1, {4: 7}, threshold=4, finished="stop"))
    assert summary_of(actions).mean_threshold is None


def test_a_missed_slo_is_counted_as_missed() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1, make_spec(slo_s=1.0))
    actions = story.report(1.5, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    assert summary_of(actions).slo_met is False


@pytest.mark.parametrize(
    ("fields", "threshold"),
    [
        ({}, 0.8),  # the highest candidate
        ({"min_threshold": 0.85}, 0.85),
        ({"min_threshold": 0.5}, 0.8),
        ({"pinned": True, "decoding": Decoding(block_length=BLOCK, value=0.3)}, 0.3),
    ],
)
def test_the_policy_sets_the_threshold_unless_the_client_did(fields: dict, threshold: float) -> None:
    story = Story(thresholds=(0.6, 0.8))
    story.serve()
    assert admit_of(story.arrive(0.0, 1, make_spec(**fields))).decoding.value == threshold


# ---- the waiting queue


def test_requests_wait_until_an_instance_serves() -> None:
    story = Story()
    assert story.arrive(0.0, 1) == []
    assert story.start_ranks() == [FormInstance("i0.1", (rank(0),))]
    assert story.form("i0.1") == [Send("i0.1", make_admit(1, make_spec()))]


def test_priority_goes_before_arrival() -> None:
    story = Story()
    story.start_ranks()
    story.arrive(0.0, 1)
    story.arrive(0.1, 2, make_spec(priority=1))
    story.arrive(0.2, 3)
    story.arrive(0.3, 4, make_spec(priority=1))
    assert admitted(story.form("i0.1")) == [("i0.1", 2), ("i0.1", 4), ("i0.1", 1), ("i0.1", 3)]


def test_a_big_request_without_room_does_not_hold_up_a_small_one() -> None:
    story = Story()
    story.serve(num_pages=8)
    assert admitted(story.arrive(0.0, 1, make_spec(num_blocks=4))) == [("i0.1", 1)]  # 5 pages, 3 are left
    assert admitted(story.arrive(0.1, 2, make_spec(num_blocks=4))) == []
    assert admitted(story.arrive(0.2, 3, make_spec(num_blocks=1))) == [("i0.1", 3)]
    done = story.report(0.3, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    assert admitted(done) == [("i0.1", 2)]


def test_pages_are_counted_in_whole_pages_and_come_back() -> None:
    story = Story()
    story.serve(num_pages=8)
    instance = story.scheduler.cluster.instances["i0.1"]
    spec = make_spec()
    longer = [1, *spec.canvas]  # 9 tokens: a third page for the last
    story.arrive(0.0, 1, make_spec())
    story.arrive(0.0, 2, type(spec)("r", longer, PAGE + 1, len(longer), len(longer), spec.decoding))
    assert (instance.num_pages_reserved, instance.num_tokens) == (2 + 3, 8 + 9)
    story.at(0.1, Cancelled(2, "abandoned"))
    story.report(0.2, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    assert (instance.num_pages_reserved, instance.num_tokens) == (0, 0)


def test_without_a_cache_only_the_number_of_requests_counts() -> None:
    story, spec = Story(max_num_seqs=2), make_spec(decoding=Decoding(block_length=BLOCK, cache="none"))
    story.serve(num_pages=1)
    assert admitted(story.arrive(0.0, 1, spec)) == [("i0.1", 1)]
    assert admitted(story.arrive(0.0, 2, spec)) == [("i0.1", 2)]
    assert admitted(story.arrive(0.0, 3, spec)) == []
    assert story.scheduler.cluster.instances["i0.1"].num_pages_reserved == 0


def test_the_instance_with_the_fewest_tokens_gets_the_request() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    assert admitted(story.arrive(0.0, 1, make_spec(num_blocks=3))) == [("i0.1", 1)]
    assert admitted(story.arrive(0.1, 2)) == [("i1.1", 2)]
    assert admitted(story.arrive(0.2, 3)) == [("i1.1", 3)]


def test_a_full_queue_refuses() -> None:
    story = Story(max_queue=1, max_num_seqs=1)
    story.serve()
    story.arrive(0.0, 1)
    story.arrive(0.1, 2)
    error = error_of(story.arrive(0.2, 3))
    assert isinstance(error, QueueFull) and "1 requests wait" in str(error)
    assert story.scheduler.requests.keys() == {1, 2}


def test_a_canvas_beyond_the_context_is_refused_at_once() -> None:
    error = error_of(Story().arrive(0.0, 1, make_spec(num_blocks=16)))
    assert isinstance(error, ContextTooLong) and "68 tokens" in str(error) and "64" in str(error)


def test_a_request_that_no_instance_can_hold_is_refused_at_once() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve(num_pages=4)
    assert isinstance(error_of(story.arrive(0.0, 1, make_spec(num_blocks=4))), ContextTooLong)


def test_a_waiting_request_fails_once_it_is_known_that_no_instance_can_hold_it() -> None:
    story = Story(tp_layout=(1, 1))
    story.start_ranks()
    story.arrive(0.0, 1, make_spec(num_blocks=4))
    assert story.form("i0.1", num_pages=4) == []  # the other one may be larger
    assert isinstance(error_of(story.form("i1.1", num_pages=4)), ContextTooLong)


# ---- cancel, failure, release


def test_cancelling_a_waiting_request_tells_no_instance() -> None:
    story = Story()
    story.arrive(1.0, 1)
    assert story.at(3.0, Cancelled(1, "abandoned")) == [Drop(1, "abandoned", make_summary(latency_s=2.0))]
    assert story.at(3.0, Cancelled(1, "abandoned")) == []


def test_cancelling_a_running_request_makes_room() -> None:
    story = Story(max_num_seqs=1)
    story.serve()
    story.arrive(0.0, 1)
    story.arrive(0.0, 2)
    assert story.at(1.0, Cancelled(1, "stop")) == [
        Send("i0.1", Cancel(1)),
        Drop(1, "stop", make_summary(latency_s=1.0, instances=["i0.1"])),
        Send("i0.1", make_admit(2, make_spec())),
    ]
    assert story.report(1.1, "i0.1", 0, make_step(1, {4: 7})) == []  # was on its way


def test_a_request_whose_logits_are_not_finite_fails_alone() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1)
    story.arrive(0.0, 2)
    failure = Failure(1, "not_finite", "NaN in the logits")
    actions = story.report(0.1, "i0.1", 0, make_step(2, {4: 7}), failed=[failure])
    assert actions[0] == Deliver(2, StepUpdate(1, make_step(2, {4: 7})), 0.1)
    assert isinstance(error_of(actions), NotFinite) and "NaN in the logits" in str(error_of(actions))
    assert story.scheduler.requests.keys() == {2}


@pytest.mark.parametrize(("kind", "error"), [("no_pages", OutOfPages), ("refused", WorkerError)])
def test_a_request_that_its_instance_refused_fails_with_the_reason(kind, error) -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1)
    [fail] = story.report(0.1, "i0.1", 0, failed=[Failure(1, kind, "why")])
    assert type(fail.error) is error and str(fail.error) == "why"
    assert not story.scheduler.requests


def test_a_released_request_is_placed_anew_before_newer_ones() -> None:
    story, spec = Story(max_num_seqs=1), make_spec(num_blocks=2)
    story.serve()
    story.arrive(0.0, 1, spec)
    story.arrive(0.1, 2, make_spec(priority=5))
    block = {4: 5, 5: 6, 6: 7, 7: 8}
    assert story.report(0.2, "i0.1", 0, make_step(1, block)) == [
        Deliver(1, StepUpdate(1, make_step(1, block)), 0.2)
    ]
    canvas = [1, 2, 3, 4, 5, 6, 7, 8, MASK, MASK, MASK, MASK]
    assert story.report(0.3, "i0.1", 1, released=[1]) == [
        Send("i0.1", make_admit(1, spec, canvas, steps_done=1, steps_in_block=0))
    ]


@pytest.mark.parametrize("tokens", [[], [5, 6]])
def test_a_step_has_a_token_for_each_position(tokens: list[int]) -> None:
    request = RequestState(1, make_spec(1), 0.0, MASK, num_pages=2)
    with pytest.raises(ValueError, match=f"request 1: {len(tokens)} tokens at 1 positions"):
        request.apply(RequestStep(1, True, 0, 0.9, [4], tokens, [0.9]))
    request.check()
