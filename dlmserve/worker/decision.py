"""Which masked positions a step unmasks: each request's rule as arrays, and the decision where the step runs.

On a CPU the host decides; on a GPU one kernel does, queued behind the step, and only its outcome comes back. Knows
nothing of canvases' contents.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlmserve import kernels
from dlmserve.worker.canvas import Part

RULES = {"threshold": kernels.THRESHOLD, "factor": kernels.FACTOR, "steps": kernels.QUOTA}


class Rules(NamedTuple):
    """Rule and its value of each request, as `kernels.select` takes them, and the threshold to report."""

    kind: np.ndarray
    value: np.ndarray
    thresholds: list[float]


class Decided(NamedTuple):
    """On the host, of each of M rows: token i64, confidence f32 and whether it is unmasked, bool."""

    tokens: np.ndarray
    confidences: np.ndarray
    chosen: np.ndarray


def rules(parts: list[Part]) -> Rules:
    """As of now: thresholds change between steps, and a fixed schedule's quota from step to step."""
    kinds, values, thresholds = [], [], []
    for part in parts:
        resident = part.resident
        rule, kind = resident.decoding.rule, kernels.ALL
        if not part.forced:
            is_bounded = rule == "threshold" and resident.decoding.has_quota
            kind = kernels.AT_LEAST + resident.steps_quota if is_bounded else RULES[rule]
        kinds.append(kind)
        values.append(float(resident.steps_quota) if rule == "steps" else resident.threshold)
        thresholds.append(resident.threshold)
    return Rules(np.array(kinds), np.array(values, dtype=np.float64), thresholds)


def arrays(rules: Rules, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """What the device needs to decide; offsets [R + 1]: the rows of each request."""
    return {"rule.offsets": offsets, "rule.kind": rules.kind, "rule.value": rules.value}


def decide_on_host(parts: Tensor, arrays: dict[str, np.ndarray]) -> list[Tensor]:
    """The fields of Decided, from parts f32 [tp, 4, M]."""
    scores, slices = zip(*map(kernels.unpack, parts), strict=True)
    rows = kernels.combine(slices, scores)
    confidence = kernels.confidence(rows)
    return [rows.token, confidence, kernels.select(confidence, *map(torch.from_numpy, arrays.values()))]


def decide_on_device(parts: Tensor, index: dict[str, Tensor], shifted: bool) -> list[Tensor]:
    """The memory of a StepOutcome, by one kernel; `index` has the rules and the batch. It writes to the batch's tokens,
    which nobody reads again: the host's canvases are the ones that count.
    """
    position = index["rows"] + 1 if shifted else index["rows"]
    rules = (index["rule.offsets"], index["rule.kind"], index["rule.value"])
    return [kernels.unmask_step(parts, *rules, position, index["tokens"]).memory]


def from_device(memory: np.ndarray, num_rows: int, num_requests: int) -> Decided:
    """From what `decide_on_device` gave, on the host."""
    return Decided(*kernels.outcome_arrays(memory, num_rows, num_requests))
