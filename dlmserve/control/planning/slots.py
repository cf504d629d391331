"""Stage 2 of the planner, exact: which instances stay, and which GPUs the others get.

u[l] in {0, 1}     slot l, of a node and a TP degree, is used
a[g, l] in {0, 1}  GPU g of the node is in slot l
m[i, l] in {0, 1}  the present instance i stays, in slot l

max sum m    sum_l u = X_d    sum_g a[g, l] = d u[l]    sum_l a[g, l] <= 1    m[i, l] <= u[l], a[g, l] for its g
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlmserve.control.planning.solver import Clock, minimise


class Held(NamedTuple):
    """An instance: node by index, GPUs of the node by number."""

    node: int
    gpus: tuple[int, ...]


class Slots(NamedTuple):
    """One node's part of the program."""

    degrees: list[int]  # of each slot
    used: Any
    gpus: Any
    stays: list[tuple[Any, list[int]]]  # for each present instance: m, and the slots that it may be in


def most_kept(
    nodes: Sequence[int], present: Sequence[Held], wanted: Mapping[int, int], time_limit_s: float = 10.0
) -> list[Held] | None:
    """The new layout; instances that stay are in it unchanged. None where it does not fit."""
    import cvxpy as cp

    degrees = sorted(degree for degree, num in wanted.items() if num)
    constraints: list[Any] = []
    parts = [
        _node(num_gpus, degrees, [held for held in present if held.node == node], constraints)
        for node, num_gpus in enumerate(nodes)
    ]
    for degree in degrees:
        slots = [part.used[i] for part in parts for i, each in enumerate(part.degrees) if each == degree]
        constraints.append(sum(slots) == wanted[degree])
    kept = [cp.sum(m) for part in parts for m, _ in part.stays]
    goal = -sum(kept) if kept else cp.Constant(0.0)
    if minimise(goal, constraints, Clock(time_limit_s), gap=0.0, abs_gap=0.99) == "infeasible":
        return None
    return [
        Held(node, tuple(np.flatnonzero(part.gpus.value[:, slot] > 0.5).tolist()))
        for node, part in enumerate(parts)
        for slot in range(len(part.degrees))
        if part.used.value[slot] > 0.5
    ]


def _node(num_gpus: int, degrees: list[int], held: list[Held], constraints: list[Any]) -> Slots:
    import cvxpy as cp

    of_slot = [degree for degree in degrees for _ in range(num_gpus // degree)]
    used = cp.Variable(max(len(of_slot), 1), boolean=True)
    gpus = cp.Variable((num_gpus, max(len(of_slot), 1)), boolean=True)
    if not of_slot:
        return Slots([], used, gpus, [])
    constraints += [
        cp.sum(gpus, axis=0) == cp.multiply(np.array(of_slot), used),
        cp.sum(gpus, axis=1) <= 1,
    ]
    alike = [i for i in range(len(of_slot) - 1) if of_slot[i] == of_slot[i + 1]]
    if alike:
        constraints.append(used[alike] >= used[[i + 1 for i in alike]])
    stays = []
    for instance in held:
        slots = [i for i, degree in enumerate(of_slot) if degree == len(instance.gpus)]
        if not slots:
            continue
        m = cp.Variable(len(slots), boolean=True)
        constraints += [cp.sum(m) <= 1, m <= used[slots]]
        constraints += [m <= gpus[gpu, slots] for gpu in instance.gpus]
        stays.append((m, slots))
    return Slots(of_slot, used, gpus, stays)
