"""Stage 2: as many instances stay as can. The greedy against the integer program, on aligned clusters."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.layouts import aligned_case
from dlmserve.control.planning.slots import Held, most_kept
from dlmserve.control.policy.movement import Movement, least_movement

seeds = st.integers(0, 10**6)


def greedy(nodes: list[int], present: list[Held], wanted: dict[int, int]) -> Movement:
    names = {str(node): num for node, num in enumerate(nodes)}
    return least_movement(
        names,
        [(str(held.node), len(held.gpus)) for held in present],
        [degree for degree, num in wanted.items() for _ in range(num)],
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_greedy_keeps_as_many_as_the_integer_program(seed: int) -> None:
    nodes, present, wanted = aligned_case(random.Random(seed))
    exact = most_kept(nodes, present, wanted, time_limit_s=120.0)
    assert exact is not None
    assert Counter(len(held.gpus) for held in exact) == Counter(wanted)
    assert len(greedy(nodes, present, wanted).kept) == len(set(exact) & set(present))


@given(seeds)
def test_what_packs_is_placed_and_no_gpu_is_used_twice(seed: int) -> None:
    nodes, present, wanted = aligned_case(random.Random(seed))
    movement = greedy(nodes, present, wanted)
    after = [(str(present[i].node), len(present[i].gpus)) for i in movement.kept] + list(movement.new)
    assert Counter(degree for _, degree in after) == Counter(wanted)
    for node, num_gpus in enumerate(nodes):
        assert sum(degree for at, degree in after if at == str(node)) <= num_gpus


def test_the_node_that_loses_least_gives_way() -> None:
    """One of four on the second node costs two of two; on the first it would cost four of one."""
    nodes = {"a": 4, "b": 4}
    present = [("a", 1)] * 4 + [("b", 2)] * 2
    assert least_movement(nodes, present, [4, 1, 1, 1, 1]) == Movement((0, 1, 2, 3), (("b", 4),))
    assert least_movement(nodes, present, [4, 2, 2]) == Movement((4, 5), (("a", 4),))


def test_who_comes_first_stays_first() -> None:
    assert least_movement({"a": 4}, [("a", 1)] * 4, [2, 1, 1]) == Movement((0, 1), (("a", 2),))


def test_what_does_not_fit_is_left_out() -> None:
    assert least_movement({"a": 4}, [], [4, 1]) == Movement((), (("a", 4),))
    assert least_movement({"a": 4}, [("gone", 4)], [8]) == Movement((), ())


def test_instances_keep_their_gpus_wherever_these_are() -> None:
    present = [Held(0, (0, 3)), Held(0, (1,)), Held(0, (2,))]
    after = most_kept([4], present, {2: 2})
    assert after and set(after) == {Held(0, (0, 3)), Held(0, (1, 2))}


def test_nodes_of_any_size_are_the_integer_programs_business() -> None:
    after = most_kept([3, 5], [Held(1, (0, 1))], {2: 3})
    assert after and Held(1, (0, 1)) in after
    assert most_kept([3, 5], [], {4: 2}) is None
