"""How long a block takes on each kind of instance: the coefficients of stage 1.

A *mode* is (TP degree d, threshold c, concurrency m): m requests at once, all at c, on an instance of degree d.
Knows the cost model and the load; knows nothing of solvers.
"""

from math import comb

import numpy as np

from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.plan import Problem, RequestClass
from dlmserve.control.policy.remaining import causal_recompute_tokens

NUM_CONCURRENCIES = 8
LOAD_LIMIT = 0.9  # rho: share of their time that instances may be busy
SLO_SHARE = 0.9  # of each SLO that the mean latency may take


class BlockTimes:
    """Arrays over the classes [k], the modes [n], or both.

    blocks [k]    of one request, O_k / B
    tau_s [n]     wall time of a block: (B / T_c) E[L_d(tokens of a step)]; a step of each of the m requests is a
                  recompute with probability T_c / B. The mean over that, as L is convex: the published form,
                  L_d(mean), is up to a tenth too short.
    busy_s [k, n] instance-seconds that a block of the class takes: w tau / m, w = its tokens over a mean block's
    fits [k, n]   whether the K/V of a canvas fit on such an instance
    """

    def __init__(self, problem: Problem) -> None:
        classes = problem.classes
        prompts, outputs, self.rps = (
            np.array([getattr(each, name) for each in classes]) for name in ("prompt", "output", "rps")
        )
        block_length = problem.block_length
        self.blocks = outputs / block_length
        self.slo_s = np.array([np.inf if each.slo_s is None else each.slo_s for each in classes])
        canvases = prompts + outputs
        recomputes = canvases
        if problem.block_causal:
            recomputes = causal_recompute_tokens(prompts, self.blocks, block_length)
        mean_canvas, mean_recompute = (
            float(np.average(tokens, weights=self.rps * self.blocks)) for tokens in (canvases, recomputes)
        )
        self.modes = [
            (degree, level, concurrency)
            for degree in problem.tp_degrees
            for concurrency in _concurrencies(problem, degree, mean_canvas)
            for level in range(len(problem.thresholds))
        ]
        self.degree, self.level, self.concurrency = np.array(self.modes).T
        steps = block_length / np.array(problem.tokens_per_step)  # of a block, at each threshold
        costs = CostModel.from_points(problem.step_s, "planner")
        self.tau_s = np.array(
            [
                steps[level] * _step_s(costs, degree, m, 1 / steps[level], mean_recompute, block_length)
                for degree, level, m in self.modes
            ]
        )
        cache_tokens = (steps - 1) * block_length
        weights = (recomputes[:, None] + cache_tokens) / (mean_recompute + cache_tokens)
        self.busy_s = weights[:, self.level] * (self.tau_s / self.concurrency)
        kv_tokens = np.inf if problem.kv_tokens is None else problem.kv_tokens * self.degree
        self.fits = canvases[:, None] <= kv_tokens

    @property
    def block_rate(self) -> np.ndarray:
        """Share of all blocks that a block of each class stands for, [k]: sum(block_rate * blocks) = 1."""
        return self.rps / float(self.rps @ self.blocks)


def unservable(problem: Problem) -> str:
    """Which constraint fails whatever the number of GPUs; "" where none does."""
    times = BlockTimes(problem)
    homeless = np.flatnonzero(~times.fits.any(axis=1))
    if homeless.size:
        largest = (problem.kv_tokens or 0) * max(problem.tp_degrees)
        return f"KV memory: {_name(problem.classes[homeless[0]])}; the largest instance holds {largest}"
    fastest_s = times.blocks * np.where(times.fits, times.tau_s, np.inf).min(axis=1)
    worst = int(np.argmax(fastest_s / times.slo_s))
    if fastest_s[worst] > SLO_SHARE * times.slo_s[worst]:
        return (
            f"SLO: {_name(problem.classes[worst])} take {fastest_s[worst]:.3g} s at best; "
            f"that may be {SLO_SHARE:g} of their SLO of {times.slo_s[worst]:.3g} s"
        )
    return ""


def _name(each: RequestClass) -> str:
    return f"requests of {each.prompt:.0f}+{each.output:.0f} tokens"


def _concurrencies(problem: Problem, degree: int, mean_canvas: float) -> list[int]:
    limit = problem.max_num_seqs
    if problem.kv_tokens is not None:
        limit = min(limit, max(int(problem.kv_tokens * degree / mean_canvas), 1))
    return sorted({round(each) for each in np.geomspace(1, limit, NUM_CONCURRENCIES)})


def _step_s(costs: CostModel, degree: int, m: int, share: float, recompute: float, block: int) -> float:
    """Mean over how many of the m requests recompute (binomial; each with probability `share`)."""
    recomputing = np.arange(m + 1)
    odds = np.array([comb(m, j) * share**j * (1 - share) ** (m - j) for j in range(m + 1)])
    return float(odds @ costs.step_s_many(degree, recomputing * recompute + (m - recomputing) * block))
