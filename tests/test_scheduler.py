"""Short stories about the scheduler: literal events, and the whole ordered log of what it wants done."""

import pytest

from dlmserve.control.policy.events import (
    Cancelled,
    Deliver,
    DissolveInstance,
    Drop,
    Fail,
    Finish,
    FormInstance,
    NodeLost,
    NodeUp,
    RankFormed,
    RankLeft,
    RankLost,
    RankUp,
    Reject,
    RestartRank,
    Send,
    Tick,
)
from dlmserve.control.policy.request import StepUpdate, Summary, Unmasked
from dlmserve.errors import ContextTooLong, DlmServeError, NotFinite, QueueFull, Unavailable, WorkerError
from dlmserve.messages import Admit, Cancel, Decoding
from tests.story import BLOCK, MASK, PAGE, Story, make_admit, make_spec, make_step, rank


def update(step: int, tokens: dict[int, int], recompute: bool = False, block: int = 0) -> StepUpdate:
    unmasked = [Unmasked(position, token, 0.5) for position, token in tokens.items()]
    return StepUpdate(step, recompute, block, 0.9, unmasked)


def summary(**fields) -> Summary:
    values = {
        "steps": 0, "recompute_steps": 0, "num_unmasked": 0, "mean_threshold": None, "latency_s": 0.0,
        "slo_s": None, "slo_met": None, "instances": [],
    }  # fmt: skip
    return Summary(**(values | fields))


def admitted(actions: list) -> list[tuple[str, int]]:
    """(instance, request) of each Admit; the other actions are left out."""
    return [
        (a.instance, a.command.request)
        for a in actions
        if isinstance(a, Send) and isinstance(a.command, Admit)
    ]


def error_of(actions: list) -> DlmServeError:
    """The error of the only Reject or Fail."""
    [action] = [action for action in actions if isinstance(action, Reject | Fail)]
    return action.error


# ---- one request


def test_a_request_arrives_runs_and_finishes() -> None:
    story, spec = Story(), make_spec(slo_s=2.0)
    story.serve()
    assert story.arrive(10.0, 1, spec) == [Send("i0.1", make_admit(1, spec))]
    assert story.report(10.5, "i0.1", 0, make_step(1, {4: 7}, recompute=True)) == [
        Deliver(1, update(1, {4: 7}, recompute=True), 0.5)
    ]
    last = make_step(1, {5: 8, 6: 8, 7: 8}, finished="length")
    assert story.report(11.0, "i0.1", 1, last) == [
        Deliver(1, update(2, {5: 8, 6: 8, 7: 8}), 1.0),
        Finish(
            1,
            "length",
            summary(
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
    assert actions[-1].summary.mean_threshold == pytest.approx((0.9 + 3 * 0.5) / 4)


def test_a_fixed_schedule_has_no_mean_threshold() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1, make_spec(pinned=True, decoding=Decoding(block_length=BLOCK, rule="steps", value=4)))
    actions = story.report(0.1, "i0.1", 0, make_step(1, {4: 7}, threshold=4, finished="stop"))
    assert actions[-1].summary.mean_threshold is None


def test_a_missed_slo_is_counted_as_missed() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1, make_spec(slo_s=1.0))
    actions = story.report(1.5, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    assert actions[-1].summary.slo_met is False


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
    [send] = story.arrive(0.0, 1, make_spec(**fields))
    assert send.command.decoding.value == threshold


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
    assert story.at(3.0, Cancelled(1, "abandoned")) == [Drop(1, "abandoned", summary(latency_s=2.0))]
    assert story.at(3.0, Cancelled(1, "abandoned")) == []


def test_cancelling_a_running_request_makes_room() -> None:
    story = Story(max_num_seqs=1)
    story.serve()
    story.arrive(0.0, 1)
    story.arrive(0.0, 2)
    assert story.at(1.0, Cancelled(1, "stop")) == [
        Send("i0.1", Cancel(1)),
        Drop(1, "stop", summary(latency_s=1.0, instances=["i0.1"])),
        Send("i0.1", make_admit(2, make_spec())),
    ]
    assert story.report(1.1, "i0.1", 0, make_step(1, {4: 7})) == []  # was on its way


def test_a_request_whose_logits_are_not_finite_fails_alone() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1)
    story.arrive(0.0, 2)
    actions = story.report(0.1, "i0.1", 0, make_step(2, {4: 7}), failed=[(1, "NaN in the logits")])
    assert actions[0] == Deliver(2, update(1, {4: 7}), 0.1)
    assert isinstance(error_of(actions), NotFinite) and "NaN in the logits" in str(error_of(actions))
    assert story.scheduler.requests.keys() == {2}


def test_a_released_request_is_placed_anew_before_newer_ones() -> None:
    story, spec = Story(max_num_seqs=1), make_spec(num_blocks=2)
    story.serve()
    story.arrive(0.0, 1, spec)
    story.arrive(0.1, 2, make_spec(priority=5))
    block = {4: 5, 5: 6, 6: 7, 7: 8}
    assert story.report(0.2, "i0.1", 0, make_step(1, block)) == [Deliver(1, update(1, block), 0.2)]
    canvas = [1, 2, 3, 4, 5, 6, 7, 8, MASK, MASK, MASK, MASK]
    assert story.report(0.3, "i0.1", 1, released=[1]) == [
        Send("i0.1", make_admit(1, spec, canvas, steps_done=1, steps_in_block=0))
    ]


# ---- instances that are lost


def test_a_request_goes_on_elsewhere_from_the_heads_canvas() -> None:
    story, spec = Story(tp_layout=(1, 1)), make_spec(num_blocks=2)
    story.serve()
    assert admitted(story.arrive(0.0, 1, spec)) == [("i0.1", 1)]
    story.report(0.1, "i0.1", 0, make_step(1, {4: 5, 5: 6, 6: 7, 7: 8}))
    story.report(0.2, "i0.1", 1, make_step(1, {8: 1}, block=1))
    story.report(0.3, "i0.1", 2, make_step(1, {10: 2}, block=1))
    canvas = [1, 2, 3, 4, 5, 6, 7, 8, 1, MASK, 2, MASK]
    assert story.at(0.4, RankLost(rank(0), "killed", exited=True)) == [
        DissolveInstance("i0.1", (), "rank n:0:1 is down: killed"),
        Send("i1.1", make_admit(1, spec, canvas, steps_done=3, steps_in_block=2)),
    ]
    late = make_step(1, {9: 3}, block=1)
    assert story.report(0.5, "i0.1", 3, late) == []  # what the dead one still said
    assert story.report(0.6, "i1.1", 0, late) == [Deliver(1, update(4, {9: 3}, block=1), 0.6)]


def test_an_instance_has_no_say_in_a_request_that_another_holds() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    assert admitted(story.arrive(0.0, 1)) == [("i0.1", 1)]
    assert story.report(0.1, "i1.1", 0, make_step(1, {4: 7}), released=[1], failed=[(1, "NaN")]) == []


def test_a_report_counts_once() -> None:
    story = Story()
    story.serve()
    story.arrive(0.0, 1)
    assert len(story.report(0.1, "i0.1", 0, make_step(1, {4: 7}))) == 1
    assert story.report(0.2, "i0.1", 0, make_step(1, {4: 7})) == []


def test_requests_wait_for_the_instance_to_be_formed_again_and_keep_their_order() -> None:
    story = Story(max_num_seqs=2)
    story.serve()
    for request in (1, 2):
        story.arrive(0.0, request)
    story.arrive(0.1, 3, make_spec(priority=9))
    assert story.at(1.0, RankLost(rank(0), "killed", exited=True)) == [
        DissolveInstance("i0.1", (), "rank n:0:1 is down: killed")
    ]
    assert story.at(2.0, RankUp(rank(0, generation=2), "plan")) == [
        FormInstance("i0.2", (rank(0, generation=2),))
    ]
    assert admitted(story.form("i0.2")) == [("i0.2", 1), ("i0.2", 2)]  # they had started
    assert story.scheduler.requests[1].instances == ["i0.1", "i0.2"]


def test_the_whole_instance_is_lost_with_one_rank_and_formed_again_by_those_who_left() -> None:
    story = Story(tp_layout=(2,))
    assert story.start_ranks() == [FormInstance("i0.1", (rank(0), rank(1)))]
    assert story.at(0.5, RankFormed("i0.1", 0, 8)) == []
    story.arrive(0.5, 1)
    assert admitted(story.at(0.6, RankFormed("i0.1", 1, 8))) == [("i0.1", 1)]
    reason = "rank n:1:1 is down: killed"
    assert story.at(1.0, RankLost(rank(1), "killed", exited=True)) == [
        DissolveInstance("i0.1", (rank(0),), reason)
    ]
    assert story.at(1.1, RankUp(rank(1, generation=2), "plan1")) == []  # the other has not left yet
    assert story.at(1.2, RankLeft("i0.1", 0, "")) == [FormInstance("i0.2", (rank(0), rank(1, generation=2)))]
    assert admitted(story.form("i0.2")) == [("i0.2", 1)]


def test_followers_whose_leader_died_are_told_themselves() -> None:
    story = Story(tp_layout=(4,))
    story.serve()
    [dissolve] = story.at(1.0, RankLost(rank(0), "killed", exited=True))
    assert dissolve == DissolveInstance("i0.1", (rank(1), rank(2), rank(3)), "rank n:0:1 is down: killed")


def test_a_silent_rank_is_restarted() -> None:
    story = Story()
    story.serve()
    assert story.at(5.0, RankLost(rank(0), "no heartbeat for 10 s", exited=False)) == [
        DissolveInstance("i0.1", (), "rank n:0:1 is down: no heartbeat for 10 s"),
        RestartRank(rank(0), "no heartbeat for 10 s"),
    ]
    assert story.at(5.1, RankLost(rank(0), "killed", exited=True)) == []  # the agent did so
    assert story.at(5.2, RankUp(rank(0, generation=2), "plan")) == [
        FormInstance("i0.2", (rank(0, generation=2),))
    ]


def test_a_rank_that_does_not_leave_a_lost_instance_is_restarted() -> None:
    story = Story(tp_layout=(2,), heartbeat_timeout_s=10.0)
    story.serve()
    story.at(1.0, RankLost(rank(1), "killed", exited=True))
    assert story.at(11.0, Tick()) == []
    assert story.at(11.1, Tick()) == [RestartRank(rank(0), "it did not leave a lost instance")]
    assert story.at(11.2, Tick()) == []


def test_an_instance_that_breaks_is_lost_once_and_formed_again_when_all_have_left() -> None:
    story = Story(tp_layout=(2,))
    story.serve()
    assert story.at(1.0, RankLeft("i0.1", 1, "out of memory")) == [
        DissolveInstance("i0.1", (rank(0),), "out of memory")
    ]
    assert story.at(1.1, RankLeft("i0.1", 0, "a peer left")) == [FormInstance("i0.2", (rank(0), rank(1)))]
    assert story.at(1.2, RankLeft("i0.1", 0, "said twice")) == []


def test_a_request_under_which_instances_keep_dying_fails_and_the_others_live() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    story.arrive(0.0, 1)
    for generation in (1, 2, 3):
        story.arrive(0.0, 10 + generation)
        [device] = [id.device for id in story.scheduler.cluster.instances[home(story, 1)].ranks]
        actions = story.at(
            1.0, RankLost(rank(device, story_generation(story, device)), "killed", exited=True)
        )
        story.at(1.0, RankUp(rank(device, story_generation(story, device) + 1), "plan"))
        for instance in list(story.scheduler.cluster.instances.values()):
            if not instance.serving:
                story.form(instance.name)
    assert isinstance(error_of(actions), WorkerError)
    assert story.scheduler.requests.keys() == {11, 12, 13}


def home(story: Story, request: int) -> str:
    instance = story.scheduler.requests[request].instance
    assert instance
    return instance


def story_generation(story: Story, device: int) -> int:
    return story.scheduler.cluster.ranks["n", device].id.generation


# ---- forming


def test_large_instances_are_formed_of_aligned_devices() -> None:
    story = Story(tp_layout=(1, 1, 2, 4))
    assert story.start_ranks() == [
        FormInstance("i3.1", (rank(0), rank(1), rank(2), rank(3))),
        FormInstance("i2.1", (rank(4), rank(5))),
        FormInstance("i0.1", (rank(6),)),
        FormInstance("i1.1", (rank(7),)),
    ]


def test_a_spare_device_takes_the_place_of_a_dead_one() -> None:
    story = Story(tp_layout=(1,), devices=2)
    story.serve()
    assert story.at(1.0, RankLost(rank(0), "killed", exited=True))[1:] == [FormInstance("i0.2", (rank(1),))]


def test_an_instance_never_spans_nodes() -> None:
    story = Story(tp_layout=(2,))
    for node in ("a", "b"):
        story.at(0.0, NodeUp(node, 1))
        assert story.at(0.0, RankUp(rank(0)._replace(node=node), "plan")) == []


def test_a_node_that_is_lost_takes_all_its_instances_along() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    story.arrive(0.0, 1)
    assert story.at(1.0, NodeLost("n", "gone")) == [
        DissolveInstance("i0.1", (), "node n is down: gone"),
        DissolveInstance("i1.1", (), "node n is down: gone"),
    ]
    assert story.start_ranks() == [FormInstance("i0.2", (rank(0),)), FormInstance("i1.2", (rank(1),))]
    assert admitted(story.form("i0.2")) == [("i0.2", 1)]


def test_forming_is_tried_again_later_and_given_up_when_it_keeps_failing() -> None:
    story = Story()
    story.start_ranks()
    story.arrive(0.0, 1)
    failed = story.at(0.0, RankLeft("i0.1", 0, "no such file"))
    assert failed == [DissolveInstance("i0.1", (), "no such file")]
    assert story.at(0.4, Tick()) == []
    assert story.at(0.5, Tick()) == [FormInstance("i0.2", (rank(0),))]
    story.at(0.5, RankLeft("i0.2", 0, "no such file"))
    assert story.at(1.5, Tick()) == [FormInstance("i0.3", (rank(0),))]
    given_up = error_of(story.at(1.5, RankLeft("i0.3", 0, "no such file")))
    assert isinstance(given_up, Unavailable) and "no such file" in str(given_up)
    assert isinstance(error_of(story.arrive(1.6, 2)), Unavailable)
    assert story.scheduler.cluster.failure() == "no such file"
    assert story.at(3.5, Tick()) == [FormInstance("i0.4", (rank(0),))]  # it may still recover
    story.form("i0.4")
    assert admitted(story.arrive(4.0, 3)) == [("i0.4", 3)]


def test_ranks_that_die_before_they_are_up_are_given_up() -> None:
    story = Story()
    story.at(0.0, NodeUp("n", 1))
    for generation in (1, 2, 3):
        assert story.scheduler.cluster.failure() is None
        story.at(0.0, RankLost(rank(0, generation), "no module named torch", exited=True))
    assert story.scheduler.cluster.failure() == "rank n:0:3 is down: no module named torch"
