"""Which masked positions a step unmasks: each request's rule as arrays, and the decision where the step runs.

On a CPU the host decides; on a GPU one kernel does, queued behind the step, and only its outcome comes back. Knows
nothing of canvases.
"""

import numpy as np
import torch
from torch import Tensor

from dlmserve import kernels
from dlmserve.worker.canvas import StepPlan
from dlmserve.worker.sampling import RowGroup

RULES = {"threshold": kernels.THRESHOLD, "factor": kernels.FACTOR, "steps": kernels.QUOTA}


def rules(plans: list[StepPlan], groups: list[RowGroup]) -> dict[str, np.ndarray]:
    """Rows, rule and its value of each request, as `kernels.select` takes them."""
    kinds, values = [], []
    for plan in plans:
        rule, kind = plan.resident.decoding.rule, kernels.ALL
        if not plan.forced:
            is_bounded = rule == "threshold" and plan.resident.decoding.max_block_steps
            kind = kernels.AT_LEAST + plan.resident.steps_quota if is_bounded else RULES[rule]
        kinds.append(kind)
        values.append(float(plan.resident.steps_quota) if rule == "steps" else plan.resident.threshold)
    return {
        "rule.offsets": np.array([0, *(group.end for group in groups)]),
        "rule.kind": np.array(kinds),
        "rule.value": np.array(values, dtype=np.float64),
    }


def decide_on_host(parts: Tensor, rules: dict[str, np.ndarray]) -> list[Tensor]:
    """token i64, confidence f32 and whether it is unmasked, bool, of each of M rows; parts f32 [tp, 4, M]."""
    scores, slices = zip(*map(kernels.unpack, parts), strict=True)
    rows = kernels.combine(slices, scores)
    confidence = kernels.confidence(rows)
    return [rows.token, confidence, kernels.select(confidence, *map(torch.from_numpy, rules.values()))]


def decide_on_device(parts: Tensor, index: dict[str, Tensor], shifted: bool) -> list[Tensor]:
    """The same by one kernel; `index` has the rules and the batch. It writes to the batch's tokens, which nobody
    reads again: the host's canvases are the ones that count.
    """
    position = index["rows"] + 1 if shifted else index["rows"]
    rules = (index["rule.offsets"], index["rule.kind"], index["rule.value"])
    outcome = kernels.unmask_step(parts, *rules, position, index["tokens"])
    return [outcome.token, outcome.confidence, outcome.unmask]
