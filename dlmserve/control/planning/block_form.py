"""Stage 1: how many instances of each TP degree, at which thresholds. The block form (ours).

    beta[k, n] >= 0   blocks of class k decoded in mode n = (TP degree, threshold, concurrency)
    z[d, m] in {0, 1} the concurrency of degree d, one each
    X[d] integer      instances of degree d

The paper splits a request's recompute and cache steps over degrees independently, so its plan can compute a
block's K/V on one instance and use them on another. A block is the smallest thing that one instance does.
"""

from typing import Any

import numpy as np
from msgspec.structs import replace

from dlmserve.control.planning.block_times import LOAD_LIMIT, SLO_SHARE, BlockTimes, unservable
from dlmserve.control.planning.goals import Form, solve_in_order
from dlmserve.control.planning.solver import Clock, minimise
from dlmserve.control.policy.plan import Outcome, Plan, Problem, counts_of, fill
from dlmserve.errors import NoPlan

TIME_LIMIT_S = 20.0


def solve(problem: Problem, time_limit_s: float = TIME_LIMIT_S) -> Plan:
    """The best layout for the load: highest threshold, then lowest latency, then fewest instances.

    `time_limit_s`: for that, and as much again for what the present layout would do. Raises NoPlan where that
    was too short for any answer.
    """
    reason = unservable(problem)
    if reason:
        return _infeasible(problem, reason)
    clock, times = Clock(time_limit_s), BlockTimes(problem)
    form, beta = build(problem, times)
    form.constraints += gpu_limits(problem, form.instances)
    solved = solve_in_order(form, lambda: (beta.value, form.instances.value), clock)
    if solved is None:
        return _infeasible(problem, _missing_gpus(problem, times, clock))
    status, (blocks, instances) = solved
    counts = {d: round(float(num)) for d, num in zip(problem.tp_degrees, instances, strict=True)}
    return Plan(
        status=status,
        needed={degree: num for degree, num in counts.items() if num},
        layout=fill(problem.nodes, counts, problem.tp_degrees),
        outcome=_outcome(problem, times, blocks),
        present=assess(problem, counts_of(problem.present), time_limit_s),
    )


def build(problem: Problem, times: BlockTimes) -> tuple[Form, Any]:
    """Everything but the GPUs that there are; and the variable beta."""
    import cvxpy as cp

    degrees = problem.tp_degrees
    settings = sorted({(degree, m) for degree, _, m in times.modes})
    in_setting = np.array([[(d, m) == each for d, _, m in times.modes] for each in settings], dtype=float)
    beta = cp.Variable((len(times.rps), len(times.modes)), nonneg=True)
    z = cp.Variable((1, len(settings)), boolean=True)
    instances = cp.Variable(len(degrees), integer=True)
    constraints = [
        cp.sum(beta, axis=1) == times.blocks,
        beta @ in_setting.T <= times.blocks[:, None] @ z,
        beta <= times.blocks[:, None] * times.fits,
        instances >= 0,
    ]
    bounded = np.isfinite(times.slo_s)
    if bounded.any():
        constraints.append((beta @ times.tau_s)[bounded] <= SLO_SHARE * times.slo_s[bounded])
    for index, degree in enumerate(degrees):
        of_degree = [d == degree for d, _ in settings]
        busy = cp.sum(cp.multiply(_busy(times, degree), beta))
        constraints += [cp.sum(z[:, of_degree]) == 1, busy <= LOAD_LIMIT * instances[index]]
    below = max(problem.thresholds) - np.array(problem.thresholds)[times.level]
    latency_s = (times.rps / times.rps.sum()) @ beta @ times.tau_s
    return Form(constraints, instances, times.block_rate @ beta @ below, latency_s), beta


def _busy(times: BlockTimes, degree: int) -> np.ndarray:
    """Instances of the degree that one block of each request keeps busy, [k, n]."""
    return times.rps[:, None] * times.busy_s * (times.degree == degree)


def gpu_limits(problem: Problem, instances: Any) -> list[Any]:
    """What packs on the nodes: where the degrees divide every node, the sum decides; else each node's own."""
    import cvxpy as cp

    degrees = np.array(problem.tp_degrees)
    if all(num % degree == 0 for num in problem.nodes for degree in problem.tp_degrees):
        return [degrees @ instances <= problem.num_gpus]
    on_node = cp.Variable((len(problem.nodes), len(degrees)), integer=True)
    return [on_node >= 0, on_node @ degrees <= np.array(problem.nodes), cp.sum(on_node, axis=0) == instances]


def assess(problem: Problem, counts: dict[int, int], time_limit_s: float = TIME_LIMIT_S) -> Outcome | None:
    """What a given layout makes of the load; None where it can't carry it, or is empty. Raises NoPlan."""
    mine = replace(problem, tp_degrees=list(counts))
    if not counts or unservable(mine):
        return None
    times = BlockTimes(mine)
    form, beta = build(mine, times)
    form.constraints.append(form.instances == np.array(list(counts.values())))
    solved = solve_in_order(form, lambda: beta.value, Clock(time_limit_s), fewest=False)
    return None if solved is None else _outcome(mine, times, solved[1])


def _infeasible(problem: Problem, reason: str) -> Plan:
    smallest = min(problem.tp_degrees)
    layout = {smallest: sum(num // smallest for num in problem.nodes)}
    return Plan("infeasible", needed=layout, layout=layout, reason=reason)


def _missing_gpus(problem: Problem, times: BlockTimes, clock: Clock) -> str:
    form, _ = build(problem, times)
    num_gpus = np.array(problem.tp_degrees) @ form.instances
    try:
        minimise(num_gpus, form.constraints, clock, abs_gap=0.99)
    except NoPlan:
        return f"GPUs: the load takes more than the {problem.num_gpus} there are"
    wanted, lowest = round(float(num_gpus.value)), min(problem.thresholds)
    return f"GPUs: the load takes {wanted} at a threshold of {lowest:g}; there are {problem.num_gpus}"


def _outcome(problem: Problem, times: BlockTimes, beta: np.ndarray) -> Outcome:
    """What the blocks in `beta` [k, n] add up to."""
    tokens = times.block_rate @ beta  # share of all tokens in each mode
    used = {degree: float(tokens[times.degree == degree].sum()) for degree in problem.tp_degrees}
    used = {degree: share for degree, share in used.items() if share > 1e-6}
    return Outcome(
        mean_threshold=float(tokens @ np.array(problem.thresholds)[times.level]),
        latency_s=float((times.rps / times.rps.sum()) @ beta @ times.tau_s),
        busy={degree: float((_busy(times, degree) * beta).sum()) for degree in used},
        threshold_mix=[float(tokens[times.level == i].sum()) for i in range(len(problem.thresholds))],
        degree_mix=used,
        concurrency={d: int(times.concurrency[int(np.argmax(tokens * (times.degree == d)))]) for d in used},
    )
