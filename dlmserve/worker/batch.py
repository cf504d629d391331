"""One packed batch: the spans of all requests that take part in a step, laid end to end.

Built from numbers only (tokens, columns, slots); knows nothing of requests, models or decoding rules.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from dlmserve.worker.kv_cache import Slots


@dataclass(frozen=True)
class Span:
    """The part of one canvas that a step computes: columns start .. end - 1 of `tokens` (the whole canvas).

    `rows` are the columns whose hidden states are wanted, in ascending order. Without `slots` nothing is cached
    (then the span is the whole canvas and attends to itself). With a `block_length` the model is block-causal, and
    the span begins and ends with blocks: a query sees the keys up to its block's end, all of them in the cache.
    """

    tokens: np.ndarray
    start: int
    end: int
    rows: np.ndarray
    slots: Slots | None
    block_length: int = 0

    @property
    def is_whole(self) -> bool:
        """It attends to itself."""
        return not self.block_length and self.start == 0 and self.end == len(self.tokens)

    @property
    def num_keys(self) -> int:
        """The canvas's first so many columns are seen: by its last block, where it has several."""
        return self.end if self.block_length else len(self.tokens)

    def by_blocks(self) -> "list[Span]":
        """Itself or, block-causal, a span for each block: then all of a span's queries see the same keys.

        A batch's K/V are written before any of its queries attends, so the parts may share a step.
        """
        if not self.block_length:
            return [self]
        bounds = [*range(self.start, self.end, self.block_length), self.end]
        cuts = np.searchsorted(self.rows, bounds)
        return [
            replace(self, start=start, end=end, rows=self.rows[cuts[i] : cuts[i + 1]])
            for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False))
        ]

    @property
    def order(self) -> int:
        """Where the span belongs in a batch: those that read the cache first, in the cache's order."""
        return 1 << 62 if self.slots is None or self.is_whole else int(self.slots.index[0])


@dataclass(frozen=True)
class Segment:
    """One request's share of the packed batch, or a block of it: its queries, wanted rows, and where its keys are."""

    start: int  # first packed token
    end: int
    row_start: int  # first of its wanted rows
    row_end: int
    slots: Slots | None  # None: the keys are the packed span itself
    num_keys: int  # in the first of the slots, else of the span

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_end)


@dataclass(frozen=True)
class Packed:
    """A batch on the host; `plan` is the attention's. `arrays` hold what the device needs of both.

    tokens, positions [T]; rows [M] index the packed tokens; store_slots [S], where anything goes into the KV cache,
    and store_from [S], the packed tokens that go there, where not all do.
    """

    num_tokens: int
    plan: Any
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    """The same on the device. rows None: the hidden states of all packed tokens are wanted."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor | None
    store_slots: Tensor | None  # None: nothing is stored
    store_from: Tensor | None  # None: all packed tokens are stored
    plan: Any
    index: dict[str, Tensor]  # the plan's arrays


def pack(spans: list[Span], plan: Callable[[list[Segment]], Any]) -> Packed:
    """Spans end to end; they come in ascending `order`."""
    lengths = [span.end - span.start for span in spans]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    row_starts = np.concatenate(([0], np.cumsum([len(span.rows) for span in spans])))
    segments = [
        Segment(
            int(starts[i]),
            int(starts[i + 1]),
            int(row_starts[i]),
            int(row_starts[i + 1]),
            None if span.is_whole else span.slots,
            span.num_keys,
        )
        for i, span in enumerate(spans)
    ]
    attention = plan(segments)
    arrays = {
        "tokens": np.concatenate([span.tokens[span.start : span.end] for span in spans]),
        "positions": np.concatenate([np.arange(span.start, span.end) for span in spans]),
        "rows": np.concatenate([span.rows - span.start + starts[i] for i, span in enumerate(spans)]),
    }
    return Packed(int(starts[-1]), attention, arrays | _stores(spans, starts) | attention.arrays)


def _stores(spans: list[Span], starts: np.ndarray) -> dict[str, np.ndarray]:
    kept = [(i, span.slots.index[span.start : span.end]) for i, span in enumerate(spans) if span.slots]
    if not kept:
        return {}
    stores = {"store_slots": np.concatenate([index for _, index in kept])}
    if len(kept) < len(spans):
        stores["store_from"] = np.concatenate([np.arange(starts[i], starts[i + 1]) for i, _ in kept])
    return stores


def on_device(packed: Packed, tensors: dict[str, Tensor]) -> Batch:
    """`tensors`: what became of `packed.arrays` there."""
    return Batch(
        tokens=tensors["tokens"],
        positions=tensors["positions"],
        rows=tensors.get("rows"),
        store_slots=tensors.get("store_slots"),
        store_from=tensors.get("store_from"),
        plan=packed.plan,
        index={name: tensors[name] for name in packed.plan.arrays},
    )
