"""From one layout to another: where instances go, in which order, and what becomes of the requests."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.control.policy.events import (
    DissolveInstance,
    FormInstance,
    LayoutWanted,
    NodeLost,
    NodeUp,
    RankLeft,
    RankLost,
    RankUp,
    Send,
)
from dlmserve.control.policy.transition import place
from dlmserve.messages import Release
from tests.story import MASK, Story, admitted, make_admit, make_spec, make_step, rank

CHANGES = "the layout changes"
degrees = st.sampled_from([1, 2, 4])


def on_node(node: str, *numbers: int) -> list[tuple[str, int]]:
    return [(node, number) for number in numbers]


# ---- where


def test_what_runs_is_kept_and_the_new_take_what_is_free_first() -> None:
    running = {"a": on_node("n", 0), "b": on_node("n", 1)}
    placement = place([1, 2], {"n": 4}, running)
    assert placement.kept == ("a",)
    assert placement.new == ((("n", 2), ("n", 3)),)


def test_a_device_to_avoid_is_taken_last() -> None:
    assert place([1], {"n": 3}, {}, {("n", 0), ("n", 1)}).new == ((("n", 2),),)


def test_a_new_instance_goes_where_it_costs_the_fewest_running_ones() -> None:
    running = {"a": on_node("x", 0), "b": on_node("x", 1), "c": on_node("y", 0)}
    placement = place([2, 1, 1], {"x": 2, "y": 2}, running)
    assert placement.new[0] == (("y", 0), ("y", 1))
    assert set(placement.kept) == {"a", "b"}


def test_no_instance_spans_nodes_and_what_does_not_fit_is_left_out() -> None:
    assert place([4, 2], {"x": 3, "y": 3}, {}).new == ((("x", 0), ("x", 1)),)


@given(st.data())
def test_whatever_fits_is_placed_on_devices_of_its_own(data: st.DataObject) -> None:
    nodes = {
        f"n{i}": size for i, size in enumerate(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4)))
    }
    running = running_instances(data, nodes)
    layout = data.draw(st.lists(degrees, min_size=1, max_size=12))
    placement = place(layout, nodes, running)
    placed = [*(tuple(running[name]) for name in placement.kept), *placement.new]
    devices = [device for each in placed for device in each]
    assert len(devices) == len(set(devices)), "a device is in two instances"
    assert all(number < nodes[node] for node, number in devices)
    assert all(len({node for node, _ in each}) == 1 for each in placed), "an instance spans nodes"
    left_out = list(layout)
    for each in placed:
        left_out.remove(len(each))
    assert bool(left_out) != fits(layout, nodes)
    if sorted(map(len, running.values())) == sorted(layout):
        assert not placement.new, "the layout is there already"


def running_instances(data: st.DataObject, nodes: dict[str, int]) -> dict[str, list[tuple[str, int]]]:
    running = {}
    for node, size in nodes.items():
        numbers, at = data.draw(st.permutations(range(size))), 0
        for degree in data.draw(st.lists(degrees, max_size=4)):
            if at + degree <= size:
                running[f"{node}.{at}"] = [(node, number) for number in numbers[at : at + degree]]
                at += degree
    return running


def fits(layout: Sequence[int], nodes: dict[str, int]) -> bool:
    """The largest first into any node: exact for degrees that divide each other."""
    left = list(nodes.values())
    for degree in sorted(layout, reverse=True):
        index = max(range(len(left)), key=left.__getitem__)
        if left[index] < degree:
            return False
        left[index] -= degree
    return True


# ---- the way there


def test_one_large_instance_becomes_two_small_ones_and_its_request_goes_on() -> None:
    story, spec = Story(tp_layout=(2,)), make_spec(num_blocks=2)
    story.serve()
    story.arrive(0.0, 1, spec)
    assert story.at(1.0, LayoutWanted((1, 1))) == [Send("i0.1", Release(1))]
    assert story.arrive(1.1, 2) == []  # the instance takes nothing new
    block = {4: 5, 5: 6, 6: 7, 7: 8}
    assert len(story.report(1.2, "i0.1", 1, make_step(1, block))) == 1
    assert story.report(1.3, "i0.1", 2, released=[1]) == [
        DissolveInstance("i0.1", (rank(0),), CHANGES, lost=False)
    ]
    assert story.at(1.4, RankLeft("i0.1", 1, "")) == [FormInstance("i2.1", (rank(1),))]
    assert story.at(1.4, RankLeft("i0.1", 0, "")) == [FormInstance("i1.1", (rank(0),))]
    canvas = [1, 2, 3, 4, 5, 6, 7, 8, MASK, MASK, MASK, MASK]
    assert story.form("i2.1", now=1.5) == [
        Send("i2.1", make_admit(1, spec, canvas, steps_done=1, steps_in_block=0)),
        Send("i2.1", make_admit(2, make_spec())),
    ]
    story.form("i1.1", now=1.6)
    scheduler = story.scheduler
    assert (scheduler.num_reconfigurations, scheduler.transition.active) == (1, False)
    assert scheduler.cluster.layout == [1, 1]


def test_only_what_is_in_the_way_is_drained_one_new_instance_at_a_time() -> None:
    story = Story(tp_layout=(1, 1, 1, 1))
    story.serve()
    first = story.at(1.0, LayoutWanted((2, 2)))
    assert first == [DissolveInstance(f"i{i}.1", (rank(i),), CHANGES, lost=False) for i in (0, 1)]
    story.at(1.1, RankLeft("i0.1", 0, ""))
    assert story.at(1.1, RankLeft("i1.1", 0, "")) == [FormInstance("i4.1", (rank(0), rank(1)))]
    assert admitted(story.arrive(1.2, 1)) == [("i2.1", 1)]  # the others serve meanwhile
    assert story.form("i4.1", now=1.3) == [
        Send("i2.1", Release(1)),
        DissolveInstance("i3.1", (rank(3),), CHANGES, lost=False),
    ]


def test_an_instance_that_nothing_replaces_is_drained_in_the_end() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    assert story.at(1.0, LayoutWanted((1,))) == [DissolveInstance("i1.1", (rank(1),), CHANGES, lost=False)]
    assert story.at(1.1, RankLeft("i1.1", 0, "")) == []
    assert not story.scheduler.transition.active
    assert story.at(2.0, LayoutWanted((1, 1))) == [FormInstance("i1.2", (rank(1),))]  # a name of its own


@pytest.mark.parametrize("layout", [(), (3,), (4,), (2, 1)])
def test_a_layout_that_cannot_be_changes_nothing(layout: tuple[int, ...]) -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    assert story.at(1.0, LayoutWanted(layout)) == []
    assert story.scheduler.transition.refusal(layout)
    assert story.scheduler.cluster.layout == [1, 1]


def test_the_layout_that_is_there_costs_nothing() -> None:
    story = Story(tp_layout=(1, 2))
    story.serve()
    assert story.at(1.0, LayoutWanted((2, 1))) == []
    assert story.scheduler.num_reconfigurations == 0


def test_a_change_of_mind_spares_what_is_still_there() -> None:
    story = Story(tp_layout=(2,))
    story.serve()
    story.arrive(0.0, 1)
    story.at(1.0, LayoutWanted((1, 1)))
    assert story.at(1.1, LayoutWanted((2,))) == []
    assert admitted(story.arrive(1.2, 2)) == [("i0.1", 2)]
    assert not story.scheduler.transition.active
    assert admitted(story.report(1.3, "i0.1", 1, released=[1])) == [("i0.1", 1)]  # asked back before


def test_a_rank_lost_on_the_way_only_delays() -> None:
    story = Story(tp_layout=(1, 1))
    story.serve()
    story.arrive(0.0, 1)
    story.at(1.0, LayoutWanted((2,)))
    story.at(1.1, RankLost(rank(0), "killed", exited=True))
    story.at(1.2, RankLeft("i1.1", 0, ""))
    [form] = story.at(1.3, RankUp(rank(0, generation=2), "plan0"))
    assert isinstance(form, FormInstance) and form.ranks == (rank(0, generation=2), rank(1))
    assert admitted(story.form(form.instance, now=1.4)) == [(form.instance, 1)]


def test_a_node_lost_on_the_way_leaves_as_much_of_the_layout_as_fits() -> None:
    story = Story(tp_layout=(1, 1, 1, 1), devices=4)
    for node in ("a", "b"):
        story.at(0.0, NodeUp(node, 2))
        for device in (0, 1):
            story.at(0.0, RankUp(rank(device)._replace(node=node), f"{node}{device}"))
    for name in list(story.scheduler.cluster.instances):
        story.form(name)
    story.at(1.0, LayoutWanted((2, 2)))
    story.at(1.1, NodeLost("a", "cut off"))
    for instance in [i for i in story.scheduler.cluster.instances.values() if not i.draining]:
        raise AssertionError(f"{instance.name} is in the way")
    story.at(1.2, RankLeft("i2.1", 0, ""))
    [form] = story.at(1.2, RankLeft("i3.1", 0, ""))
    assert isinstance(form, FormInstance) and {id.node for id in form.ranks} == {"b"}
    story.form(form.instance, now=1.3)
    story.at(2.0, NodeUp("a", 2))
    story.at(2.0, RankUp(rank(0)._replace(node="a"), "a0"))
    assert len(story.at(2.0, RankUp(rank(1)._replace(node="a"), "a1"))) == 1  # the second is formed there
