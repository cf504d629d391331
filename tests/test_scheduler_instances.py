"""Stories of instances that are formed, lost and formed again, and of the requests they held."""

from dlmserve.control.policy.events import (
    Deliver,
    DissolveInstance,
    FormInstance,
    NodeLost,
    NodeUp,
    RankFormed,
    RankLeft,
    RankLost,
    RankUp,
    RestartRank,
    Send,
    Tick,
)
from dlmserve.control.policy.request import StepUpdate
from dlmserve.errors import Unavailable, WorkerError
from dlmserve.messages import Failure
from tests.story import MASK, Story, admitted, error_of, make_admit, make_spec, make_step, rank


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
    assert story.report(0.6, "i1.1", 0, late) == [Deliver(1, StepUpdate(4, late), 0.6)]


def test_an_instance_has_no_say_in_a_request_that_another_holds() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    assert admitted(story.arrive(0.0, 1)) == [("i0.1", 1)]
    assert (
        story.report(
            0.1, "i1.1", 0, make_step(1, {4: 7}), released=[1], failed=[Failure(1, "not_finite", "NaN")]
        )
        == []
    )


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


def test_of_equal_instances_the_first_slots_is_taken_whichever_was_formed_first() -> None:
    story = Story(tp_layout=(1, 1))
    story.at(0.0, NodeUp("n", 2))
    for device in (1, 0):
        story.at(0.0, RankUp(rank(device), "plan"))
    for name in ("i1.1", "i0.1"):
        story.form(name)
    assert [admitted(story.arrive(0.5, request)) for request in (1, 2)] == [[("i0.1", 1)], [("i1.1", 2)]]


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
