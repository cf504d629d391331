"""Trains the network that reads hidden states (worker/hidden_reader.py) on recorded decodings.

Owns the table of recompute steps, the loss and the cross-fitting. The loss is Huber on log1p of both numbers; steps
count at the highest threshold only, so that what is read does not depend on the threshold in use.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve.training.courses import Course
from dlmserve.worker.hidden_reader import HiddenNetwork

LAYERS = (512, 64, 2)
LEARNING_RATE, WEIGHT_DECAY, BATCH = 1e-3, 1e-2, 64
MAX_EPOCHS, PATIENCE = 200, 15
NUM_FOLDS = 5


@dataclass(frozen=True)
class HiddenTable:
    """m recompute steps that did not end their request: what was pooled f32 [m, 2d], and what was left then.

    outlooks f32 [m, 2]: blocks after this one, steps left in it; counted: bool [m], steps are of the highest threshold.
    """

    pooled: Tensor
    outlooks: Tensor
    counted: Tensor
    requests: np.ndarray

    def of(self, requests: np.ndarray) -> "HiddenTable":
        rows = torch.from_numpy(np.isin(self.requests, requests))
        return HiddenTable(*(getattr(self, field.name)[rows] for field in fields(self)))


def hidden_table(courses: list[Course]) -> HiddenTable:
    """In the order of the courses and their steps."""
    top = max(course.threshold for course in courses)
    pooled, outlooks, counted, requests = [], [], [], []
    for course in courses:
        blocks = [step.block for step in course.steps]
        recomputes = [i for i, step in enumerate(course.steps) if step.recompute]
        for i, state in zip(recomputes, course.pooled, strict=True):
            if i + 1 < len(blocks):
                pooled.append(state)
                outlooks.append((blocks[-1] - blocks[i], blocks[i + 1 :].count(blocks[i])))
                counted.append(course.threshold == top)
                requests.append(course.request)
    return HiddenTable(
        torch.from_numpy(np.stack(pooled)),
        torch.tensor(outlooks, dtype=torch.float32),
        torch.tensor(counted),
        np.array(requests),
    )


def train_network(known: HiddenTable, validation: HiddenTable, seed: int) -> HiddenNetwork:
    """Stops when the loss on `validation` has not fallen for PATIENCE epochs; keeps the best weights."""
    generator = torch.Generator().manual_seed(seed)
    network = HiddenNetwork(_initial(known.pooled, generator))
    weights = [tensor for name, tensor in network.tensors.items() if name.startswith(("weight", "bias"))]
    for tensor in weights:
        tensor.requires_grad_()
    optimiser = torch.optim.AdamW(weights, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best, best_loss, num_worse = [], float("inf"), 0
    for _ in range(MAX_EPOCHS):
        for rows in torch.randperm(len(known.pooled), generator=generator).split(BATCH):
            optimiser.zero_grad()
            _loss(network, known, rows).backward()
            optimiser.step()
        with torch.no_grad():
            loss = float(_loss(network, validation, torch.arange(len(validation.pooled))))
        num_worse += 1
        if loss < best_loss:
            best, best_loss, num_worse = [tensor.detach().clone() for tensor in weights], loss, 0
        if num_worse == PATIENCE:
            break
    for tensor, kept in zip(weights, best, strict=True):
        tensor.requires_grad_(False).copy_(kept)
    return network


def _initial(pooled: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Uniform in +-1/sqrt(inputs), as torch's linear layers begin."""
    tensors = {"mean": pooled.mean(0), "scale": pooled.std(0) + 1e-6}
    sizes = (pooled.shape[1], *LAYERS)
    for layer, (num_in, num_out) in enumerate(zip(sizes, LAYERS, strict=False)):
        bound = num_in**-0.5
        for name, shape in (("weight", (num_out, num_in)), ("bias", (num_out,))):
            tensors[f"{name}_{layer}"] = (torch.rand(shape, generator=generator) * 2 - 1) * bound
    return tensors


def _loss(network: HiddenNetwork, table: HiddenTable, rows: Tensor) -> Tensor:
    wanted = table.outlooks[rows].log1p()
    losses = F.huber_loss(network.logs(table.pooled[rows]), wanted, reduction="none", delta=0.5)
    counted = torch.stack((torch.ones_like(table.counted[rows]), table.counted[rows]), 1)
    return losses[counted].mean()


def read_unseen(network: HiddenNetwork, table: HiddenTable, seen: np.ndarray, seed: int) -> np.ndarray:
    """f32 [m, 2]: what networks read that did not learn from the row's request.

    `network` did learn from `seen` requests: for those, NUM_FOLDS others are trained, each without one part.
    """
    read = network(table.pooled).numpy().copy()
    parts = np.array_split(np.random.default_rng(seed).permutation(seen), NUM_FOLDS)
    for i, part in enumerate(parts):
        validation = parts[(i + 1) % NUM_FOLDS]
        known = np.setdiff1d(seen, np.concatenate((part, validation)))
        fold = train_network(table.of(known), table.of(validation), seed)
        rows = np.isin(table.requests, part)
        read[rows] = fold(table.pooled[torch.from_numpy(rows)]).numpy()
    return read


def with_outlooks(courses: list[Course], read: np.ndarray) -> list[Course]:
    """The same courses as if `read` (rows of `hidden_table`) had been reported with their steps."""
    from msgspec.structs import replace

    rows = iter(read.tolist())
    told = []
    for course in courses:
        last = len(course.steps) - 1
        steps = [
            replace(step, hidden=tuple(next(rows)) if step.recompute and i < last else None)
            for i, step in enumerate(course.steps)
        ]
        told.append(Course(course.request, course.spec, steps, course.pooled))
    return told
