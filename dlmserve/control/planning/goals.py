"""The three goals of stage 1, one after the other: highest threshold, lowest latency, fewest instances.

Knows nothing of what the variables mean: both formulations of stage 1 use it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dlmserve.control.planning.solver import Clock, Status, minimise
from dlmserve.errors import NoPlan

THRESHOLD_GAP = 1e-3  # a mean threshold this close to the bound is the highest
THRESHOLD_SLACK = 1e-4  # and later goals may lower it by so much,
LATENCY_SLACK = 0.02  # and raise the latency by this share

Answer = TypeVar("Answer")


@dataclass
class Form:
    """A program without its goal. `shortfall`: of the mean threshold below the highest candidate."""

    constraints: list[Any]
    instances: Any  # integer [TP degrees]
    shortfall: Any
    latency_s: Any


def solve_in_order(
    form: Form, read: Callable[[], Answer], clock: Clock, fewest: bool = True
) -> tuple[Status, Answer] | None:
    """What `read` returns after the last goal that was solved; None where nothing is feasible.

    Raises NoPlan where the time ran out under the first goal.
    """
    import cvxpy as cp

    goals = [
        (form.shortfall, {"abs_gap": THRESHOLD_GAP}, lambda value: value + THRESHOLD_SLACK),
        (form.latency_s, {}, lambda value: value * (1 + LATENCY_SLACK)),
    ]
    if fewest:
        goals.append((cp.sum(form.instances), {"abs_gap": 0.99}, lambda value: value))
    constraints, status, answer = list(form.constraints), "optimal", None
    for goal, gap, tolerance in goals:
        try:
            solved = minimise(goal, constraints, clock, **gap)
        except NoPlan:
            if answer is None:
                raise
            return "feasible", answer
        if solved == "infeasible":
            return None if answer is None else ("feasible", answer)
        status = "feasible" if solved == "feasible" else status
        answer = read()
        constraints.append(goal <= tolerance(float(goal.value)))
    return None if answer is None else (status, answer)
