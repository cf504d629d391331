"""HiGHS through cvxpy: one way to call it, one meaning of its answers.

Knows nothing of what is being solved.
"""

import ctypes
import os
import time
import warnings
from functools import cache
from typing import Any, Literal

import numpy as np

from dlmserve.errors import NoPlan

Status = Literal["optimal", "feasible", "infeasible"]

MAX_VIOLATION = 1e-4  # of any constraint, beyond which what HiGHS returns is no answer


class Clock:
    """The time that all solves of one plan have together."""

    def __init__(self, limit_s: float) -> None:
        self._end_at = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return max(self._end_at - time.monotonic(), 0.1)


def minimise(
    objective: Any, constraints: list[Any], clock: Clock, gap: float = 0.01, abs_gap: float = 1e-6
) -> Status:
    """Solves on one thread. The gaps are to the bound that is proved: `gap` of the objective, or `abs_gap`.

    "feasible" where the time ran out with an answer in hand. Raises NoPlan where it ran out without one.
    """
    import cvxpy as cp

    _swallow_banner()
    problem = cp.Problem(cp.Minimize(objective), constraints)
    limit_s = clock.left_s
    options = {"time_limit": limit_s, "mip_rel_gap": gap, "mip_abs_gap": abs_gap, "threads": 1}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "may be inaccurate": that is checked below
            problem.solve(solver=cp.HIGHS, highs_options=options)
    except cp.SolverError:
        pass  # no answer, which is what the value says
    if problem.status in ("infeasible", "infeasible_or_unbounded"):
        return "infeasible"
    value: Any = problem.value
    if value is None or not np.isfinite(value) or _violation(constraints) > MAX_VIOLATION:
        raise NoPlan(
            f"no answer within the {limit_s:.0f} s that were left ({problem.size_metrics.num_scalar_variables} "
            "variables); plan for fewer classes of requests, or on a machine that is less busy"
        )
    return "optimal" if problem.status == cp.OPTIMAL else "feasible"


def _violation(constraints: list[Any]) -> float:
    return max(float(np.max(each.violation())) for each in constraints)


@cache
def _swallow_banner() -> None:
    """The first HiGHS object of a process prints to stdout, where `plan --json` writes."""
    import highspy

    libc = ctypes.CDLL(None)
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        highspy.Highs()
        libc.fflush(None)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
