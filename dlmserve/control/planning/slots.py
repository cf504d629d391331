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

    degrees: np.ndarray  # of each slot
    used: Any
    gpus: Any  # [GPUs, slots]
    num_kept: Any


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
        constraints.append(sum(cp.sum(part.used[part.degrees == degree]) for part in parts) == wanted[degree])
    goal = -sum(part.num_kept for part in parts)
    if minimise(goal, constraints, Clock(time_limit_s), gap=0.0, abs_gap=0.99) == "infeasible":
        return None
    return [
        Held(node, tuple(np.flatnonzero(part.gpus.value[:, slot] > 0.5).tolist()))
        for node, part in enumerate(parts)
        for slot in np.flatnonzero(part.used.value > 0.5)
    ]


def _node(num_gpus: int, degrees: list[int], held: list[Held], constraints: list[Any]) -> Slots:
    """`degrees`: of the slots, as many of each as fit; the first slot is a dummy of none."""
    import cvxpy as cp

    of_slot = np.array([0] + [degree for degree in degrees for _ in range(num_gpus // degree)])
    used = cp.Variable(len(of_slot), boolean=True)
    gpus = cp.Variable((num_gpus, len(of_slot)), boolean=True)
    constraints += [
        cp.sum(gpus, axis=0) == cp.multiply(of_slot, used),
        cp.sum(gpus, axis=1) <= 1,
        used <= of_slot,
    ]
    alike = np.flatnonzero(of_slot[:-1] == of_slot[1:])
    if alike.size:
        constraints.append(used[alike] >= used[alike + 1])
    if not held:
        return Slots(of_slot, used, gpus, 0.0)
    stays = cp.Variable((len(held), len(of_slot)), boolean=True)
    fits = np.array([[len(each.gpus) == degree for degree in of_slot] for each in held])
    holds = np.array([[float(gpu in each.gpus) for each in held] for gpu in range(num_gpus)])
    # Each GPU is held by one instance at most, so this is m[i, l] <= a[g, l] for the GPUs of i.
    constraints += [cp.sum(stays, axis=1) <= 1, stays <= fits, holds @ stays <= gpus]
    return Slots(of_slot, used, gpus, cp.sum(stays))
