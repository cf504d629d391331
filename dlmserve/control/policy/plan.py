"""The question to the planner and its answer: values that cross from the head's process to the planner's.

Owns what a layout is for a plan (how many instances of each TP degree), whether one fits on the nodes, and
whether a plan is worth the change. Knows nothing of solvers.
"""

from collections import Counter
from typing import Literal

import msgspec

# A plan that takes more than this share of the present latency is not worth a regroup,
LATENCY_WORTH = 0.9
LATENCY_WORTH_AGAIN = 0.985  # or more than this one where it is not the first to want its layout,
THRESHOLD_WORTH = 0.005  # nor one whose mean threshold is no more than this above the present one


class RequestClass(msgspec.Struct, array_like=True, frozen=True):
    """Requests of like lengths: mean prompt and output in tokens, requests a second, mean SLO (None: none)."""

    prompt: float
    output: float
    rps: float
    slo_s: float | None = None


class Problem(msgspec.Struct, array_like=True, frozen=True):
    """A load and a cluster: which layout serves the one on the other?

    `step_s`: points (packed tokens, seconds of a step) of the cost model, for each TP degree.
    `tokens_per_step`: unmasked in a step at each of `thresholds`. `kv_tokens`: K/V of how many tokens a GPU
    holds; None where that is not known. `present`: TP degrees of the instances there are.
    """

    classes: list[RequestClass]
    nodes: list[int]  # GPUs of each
    tp_degrees: list[int]
    thresholds: list[float]
    tokens_per_step: list[float]
    step_s: dict[int, list[tuple[float, float]]]
    block_length: int = 32
    max_num_seqs: int = 32
    kv_tokens: int | None = None
    present: list[int] = []
    block_causal: bool = False  # the model's: whole canvases are never computed again

    @property
    def num_gpus(self) -> int:
        return sum(self.nodes)


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """What a layout makes of the load, as the model of the planner has it."""

    mean_threshold: float  # per token
    latency_s: float  # of a mean request
    busy: dict[int, float]  # by TP degree: instances that the load keeps busy
    threshold_mix: list[float]  # share of the tokens at each threshold
    degree_mix: dict[int, float]  # and at each TP degree
    concurrency: dict[int, int]  # requests at once on an instance, by TP degree in use


class Plan(msgspec.Struct, array_like=True, frozen=True):
    """`needed`: the fewest instances that serve so, by TP degree; `layout`: the same with all GPUs put to use.

    "feasible": the time limit came before the proof. "infeasible": `reason` names the constraint that failed,
    the layout is all instances of the smallest degree, and there is no outcome. `present`: what the present
    layout would make of the load; None where it can't carry it, or there is none.
    """

    status: Literal["optimal", "feasible", "infeasible"]
    needed: dict[int, int]
    layout: dict[int, int]
    outcome: Outcome | None = None
    present: Outcome | None = None
    reason: str = ""
    solve_s: float = 0.0


def tp_layout(counts: dict[int, int]) -> tuple[int, ...]:
    """{2: 1, 1: 2} -> (2, 1, 1): largest first."""
    return tuple(degree for degree in sorted(counts, reverse=True) for _ in range(counts[degree]))


def counts_of(layout: list[int] | tuple[int, ...]) -> dict[int, int]:
    return dict(sorted(Counter(layout).items()))


def packs(nodes: list[int], counts: dict[int, int]) -> bool:
    """Whether the instances fit, none over two nodes. Exact for degrees that divide each other."""
    spare = list(nodes)
    for degree in tp_layout(counts):
        fitting = [node for node, num in enumerate(spare) if num >= degree]
        if not fitting:
            return False
        spare[min(fitting, key=lambda node: spare[node])] -= degree
    return True


def fill(nodes: list[int], counts: dict[int, int], tp_degrees: list[int]) -> dict[int, int]:
    """The layout with instances added while GPUs are spare: of the degrees it has first, largest first."""
    used = [degree for degree in counts if counts[degree]]
    filled = dict(counts)
    for degree in [*sorted(used, reverse=True), *sorted(tp_degrees, reverse=True)]:
        while packs(nodes, more := filled | {degree: filled.get(degree, 0) + 1}):
            filled = more
    return {degree: num for degree, num in sorted(filled.items()) if num}


def is_worthwhile(plan: Plan, present: tuple[int, ...], before: Plan | None = None) -> bool:
    """Whether to change the layout: the plan serves more, at a higher threshold, or much sooner.

    Somewhat sooner is enough where the plan `before` wanted the same: what few requests happened to come in a
    window differs from plan to plan.
    """
    if plan.layout == counts_of(present):
        return False
    if plan.outcome is None or plan.present is None:
        return True
    gain = plan.outcome.mean_threshold - plan.present.mean_threshold
    again = before is not None and before.layout == plan.layout
    worth = LATENCY_WORTH_AGAIN if again else LATENCY_WORTH
    sooner = plan.outcome.latency_s < worth * plan.present.latency_s
    return gain > THRESHOLD_WORTH or (sooner and gain >= -THRESHOLD_WORTH)
