"""One packed batch: the spans of all requests that take part in a step, laid end to end.

Built from numbers only (canvases, columns, slots); knows nothing of requests, models or decoding rules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dlmserve.worker.kv_cache import Slots


class Span(NamedTuple):
    """The part of one canvas that a step computes: columns start .. end - 1 of its `num_tokens`.

    The canvas begins at `place` of a flat array that holds all of them. Without `slots` nothing is cached (then the
    span is the whole canvas and attends to itself). With a `block_length` the model is block-causal, and the span
    begins and ends with blocks: a query sees the keys up to its block's end, all of them in the cache.
    """

    place: int
    num_tokens: int
    start: int
    end: int
    slots: Slots | None
    block_length: int = 0

    @property
    def is_whole(self) -> bool:
        """It attends to itself."""
        return not self.block_length and self.start == 0 and self.end == self.num_tokens

    @property
    def num_keys(self) -> int:
        """The canvas's first so many columns are seen: by its last block, where it has several."""
        return self.end if self.block_length else self.num_tokens

    def by_blocks(self) -> "list[Span]":
        """Itself or, block-causal, a span for each block: then all of a span's queries see the same keys.

        A batch's K/V are written before any of its queries attends, so the parts may share a step.
        """
        if not self.block_length:
            return [self]
        bounds = [*range(self.start, self.end, self.block_length), self.end]
        return [self._replace(start=start, end=end) for start, end in zip(bounds, bounds[1:], strict=False)]

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


def starts_of(spans: list[Span]) -> np.ndarray:
    """[N]: the first packed token of each span, where they lie end to end."""
    lengths = np.array([span.end - span.start for span in spans])
    return lengths.cumsum() - lengths


def pack(
    spans: list[Span],
    canvases: np.ndarray,
    rows: np.ndarray,
    plan: Callable[[list[Segment]], Any],
) -> Packed:
    """Spans end to end; they come in ascending `order`.

    canvases: the flat array. rows [M]: the packed tokens whose hidden states are wanted, in ascending order.
    """
    starts = [*starts_of(spans).tolist(), sum(span.end - span.start for span in spans)]
    row_starts = rows.searchsorted(starts).tolist()
    segments = [
        Segment(
            starts[i],
            starts[i + 1],
            row_starts[i],
            row_starts[i + 1],
            None if span.is_whole else span.slots,
            span.num_keys,
        )
        for i, span in enumerate(spans)
    ]
    attention = plan(segments)
    arrays = {
        "tokens": np.concatenate([canvases[s.place + s.start : s.place + s.end] for s in spans]),
        "positions": np.concatenate([np.arange(s.start, s.end) for s in spans]),
        "rows": rows,
    }
    return Packed(starts[-1], attention, arrays | _stores(spans, starts) | attention.arrays)


def _stores(spans: list[Span], starts: list[int]) -> dict[str, np.ndarray]:
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
