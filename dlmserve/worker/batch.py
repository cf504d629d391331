"""One packed batch: the spans of all requests that take part in a step, laid end to end.

Built from numbers only (tokens, columns, slots); knows nothing of requests, models or decoding rules.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlmserve.worker.kv_cache import Slots


@dataclass(frozen=True)
class Span:
    """The part of one canvas that a step computes: columns start .. end - 1 of `tokens` (the whole canvas).

    `rows` are the columns whose hidden states are wanted, in ascending order. Without `slots` nothing is cached
    (then the span is the whole canvas and attends to itself).
    """

    tokens: np.ndarray
    start: int
    end: int
    rows: np.ndarray
    slots: Slots | None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end == len(self.tokens)


@dataclass(frozen=True)
class Segment:
    """One request's share of the packed batch: its queries, and where its keys are."""

    start: int  # first query in the packed tensor
    end: int
    slots: Slots | None  # None: the keys are the packed span itself
    key_start: int  # with slots None: the span's place in the packed keys
    key_end: int


@dataclass(frozen=True)
class Batch:
    """tokens, positions [T]; rows [M] index the packed tokens; store_* say what goes into the KV cache."""

    tokens: Tensor
    positions: Tensor
    segments: list[Segment]  # queries: all packed tokens
    row_segments: list[Segment]  # queries: only the wanted rows
    rows: Tensor
    store_slots: Tensor | None  # [S]; None: nothing is stored
    store_from: Tensor | None  # [S] packed tokens that are stored; None: all of them

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def pack(spans: list[Span], device: str) -> Batch:
    """Spans end to end, one copy to the device for each tensor."""
    lengths = [span.end - span.start for span in spans]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    row_starts = np.concatenate(([0], np.cumsum([len(span.rows) for span in spans])))
    segments, row_segments = [], []
    for i, span in enumerate(spans):
        first, last = int(starts[i]), int(starts[i + 1])
        keys = None if span.is_whole else span.slots
        segments.append(Segment(first, last, keys, first, last))
        row_segments.append(Segment(int(row_starts[i]), int(row_starts[i + 1]), keys, first, last))
    tokens = np.concatenate([span.tokens[span.start : span.end] for span in spans])
    positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
    rows = np.concatenate([span.rows - span.start + starts[i] for i, span in enumerate(spans)])
    store_slots, store_from = _stores(spans, starts, device)
    return Batch(
        tokens=torch.from_numpy(tokens).to(device),
        positions=torch.from_numpy(positions).to(device),
        segments=segments,
        row_segments=row_segments,
        rows=torch.from_numpy(rows.astype(np.int64)).to(device),
        store_slots=store_slots,
        store_from=store_from,
    )


def _stores(spans: list[Span], starts: np.ndarray, device: str) -> tuple[Tensor | None, Tensor | None]:
    kept = [i for i, span in enumerate(spans) if span.slots is not None]
    if not kept:
        return None, None
    slots = torch.cat([spans[i].slots.index[spans[i].start : spans[i].end] for i in kept])  # type: ignore[union-attr]
    if len(kept) == len(spans):
        return slots, None
    source = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in kept])
    return slots, torch.from_numpy(source).to(device)
