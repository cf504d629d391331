"""Stage 1 as the TeDiServe paper has it (arXiv 2606.29094), for comparison with the block form.

Its variables: s[k, c] the share of a request at each threshold, s[k, d] its steps on each TP degree, recompute and
cache steps apart; z[d, b] the batch of each degree, in bins of packed tokens; a[g, l] GPU g is in slot l of its
node, u[l] the slot is used. The products of s with z are disaggregated by bin. Two repairs: a GPU is in at most
one slot (<=, not =), and O/B of a request's steps, not all but O/B, are recomputes.

What it can't say: that a block's cache steps run where its recompute did.
"""

from typing import Any, NamedTuple

import numpy as np

from dlmserve.control.planning.block_times import LOAD_LIMIT, SLO_SHARE
from dlmserve.control.planning.goals import Form, solve_in_order
from dlmserve.control.planning.solver import Clock, Status
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.plan import Problem

BATCH_TOKENS = (64, 256, 512, 1024, 1536, 2048, 4096, 8192)


class PaperPlan(NamedTuple):
    status: Status
    layout: dict[int, int]
    mean_threshold: float
    latency_s: float
    split: float  # share of the blocks whose cache steps are on another degree than their recompute


class _Load(NamedTuple):
    """Arrays over the classes [k] and the columns [n] = (TP degree, batch bin)."""

    rps: np.ndarray
    blocks: np.ndarray
    canvases: np.ndarray
    slo_s: np.ndarray
    degree: np.ndarray
    batch: np.ndarray
    step_s: np.ndarray


def solve_paper(problem: Problem, time_limit_s: float = 20.0) -> PaperPlan | None:
    """None where it finds no feasible plan."""
    load = _load(problem)
    form, (recomputes, caches) = _build(problem, load)

    def read() -> PaperPlan:
        counts = {d: round(float(x)) for d, x in zip(problem.tp_degrees, form.instances.value, strict=True)}
        threshold = max(problem.thresholds) - float(form.shortfall.value)
        split = _split(load, recomputes.value, caches.value)
        return PaperPlan("optimal", counts, threshold, float(form.latency_s.value), split)

    solved = solve_in_order(form, read, Clock(time_limit_s))
    return None if solved is None else solved[1]._replace(status=solved[0])


def _load(problem: Problem) -> _Load:
    classes = problem.classes
    rps, prompts, outputs = (
        np.array([getattr(each, name) for each in classes]) for name in ("rps", "prompt", "output")
    )
    slo_s = np.array([np.inf if each.slo_s is None else each.slo_s for each in classes])
    degree, batch = np.array([(d, b) for d in problem.tp_degrees for b in BATCH_TOKENS]).T
    costs = CostModel.from_points(problem.step_s, "planner")
    step_s = np.array([costs.step_s(int(d), float(b)) for d, b in zip(degree, batch, strict=True)])
    return _Load(rps, outputs / problem.block_length, prompts + outputs, slo_s, degree, batch, step_s)


def _build(problem: Problem, load: _Load) -> tuple[Form, tuple[Any, Any]]:
    import cvxpy as cp

    block_length, thresholds = problem.block_length, np.array(problem.thresholds)
    cache_steps = block_length / np.array(problem.tokens_per_step) - 1  # of a block, at each threshold
    num_classes, num_columns = len(load.rps), len(load.step_s)
    at_threshold = cp.Variable((num_classes, len(thresholds)), nonneg=True)  # blocks
    recomputes = cp.Variable((num_classes, num_columns), nonneg=True)  # steps
    caches = cp.Variable((num_classes, num_columns), nonneg=True)
    z = cp.Variable((1, num_columns), boolean=True)
    constraints = [
        cp.sum(at_threshold, axis=1) == load.blocks,
        cp.sum(recomputes, axis=1) == load.blocks,
        cp.sum(caches, axis=1) == at_threshold @ cache_steps,
        recomputes <= load.blocks[:, None] @ z,
        caches <= (load.blocks * cache_steps.max())[:, None] @ z,
    ]
    latency_s = (recomputes + caches) @ load.step_s
    bounded = np.isfinite(load.slo_s)
    if bounded.any():
        constraints.append(latency_s[bounded] <= SLO_SHARE * load.slo_s[bounded])
    instances, exclusive = _gpu_slots(problem)
    constraints += exclusive
    per_token_s = load.step_s / load.batch
    for index, degree in enumerate(problem.tp_degrees):
        mine = load.degree == degree
        constraints.append(cp.sum(z[:, mine]) == 1)
        tokens = (load.rps * load.canvases) @ recomputes + block_length * (load.rps @ caches)
        constraints.append(tokens @ (per_token_s * mine) <= LOAD_LIMIT * instances[index])
    shortfall = (load.rps / float(load.rps @ load.blocks)) @ at_threshold @ (thresholds.max() - thresholds)
    mean_latency_s = (load.rps / load.rps.sum()) @ latency_s
    return Form(constraints, instances, shortfall, mean_latency_s), (recomputes, caches)


def _gpu_slots(problem: Problem) -> tuple[Any, list[Any]]:
    """Instances of each degree, and the constraints that make them of GPUs of one node."""
    import cvxpy as cp

    instances = cp.Variable(len(problem.tp_degrees), integer=True)
    constraints, used = [], {degree: [] for degree in problem.tp_degrees}
    for num_gpus in problem.nodes:
        degrees = [d for d in problem.tp_degrees for _ in range(num_gpus // d)]
        in_slot = cp.Variable((num_gpus, len(degrees)), boolean=True)
        slot_used = cp.Variable(len(degrees), boolean=True)
        constraints += [
            cp.sum(in_slot, axis=1) <= 1,
            cp.sum(in_slot, axis=0) == cp.multiply(np.array(degrees), slot_used),
        ]
        for index, degree in enumerate(degrees):
            used[degree].append(slot_used[index])
    constraints += [instances[i] == sum(used[degree]) for i, degree in enumerate(problem.tp_degrees)]
    return instances, constraints


def _split(load: _Load, recomputes: np.ndarray, caches: np.ndarray) -> float:
    shares = []
    for steps in (recomputes, caches):
        by_degree = np.array([steps[:, load.degree == d].sum(axis=1) for d in np.unique(load.degree)])
        shares.append(by_degree / np.maximum(by_degree.sum(axis=0), 1e-9))
    apart = np.abs(shares[0] - shares[1]).sum(axis=0) / 2
    return float(np.average(apart, weights=load.rps * load.blocks))
