"""Captured steps: cache steps padded to one of few sizes, so that a GPU replays them without the host's launches.

A bucket is a rectangle of spans. What pads it reads and writes the cache's scratch page, and nobody reads its output.
Owns the buckets and their buffers; knows nothing of how a capture is done (device.py) or of requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dlmserve.worker.batch import Batch, Span
from dlmserve.worker.device import Device, Staging
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.models.decoder import Decoder

# Above, the device works longer than the host needs to launch the step piece by piece.
MAX_TOKENS = 2048
MAX_SPAN = 256
# What a row may bring along beside the batch itself: its place and its noise keys.
EXTRA_ROW_BYTES = 64
EXTRA_BYTES = 4096


@dataclass(frozen=True)
class Bucket:
    """Steps of at most `num_spans` spans of at most `span_len` tokens, each with keys in at most `num_pages`."""

    num_spans: int
    span_len: int
    num_pages: int

    @property
    def num_tokens(self) -> int:
        return self.num_spans * self.span_len


def bucket_of(spans: list[Span], page_size: int) -> Bucket | None:
    """None for a step that is run as it is: large ones, and those with spans that do not read the cache.

    Those that begin at column 0 are whole canvases, or prompts, whose lengths would each want a graph of their own.
    """
    if any(span.slots is None or span.start == 0 for span in spans):
        return None
    longest = max(span.end - span.start for span in spans)
    num_tokens = max(len(span.tokens) for span in spans)
    bucket = Bucket(_num_spans(len(spans)), _span_len(longest), _num_pages(num_tokens, page_size))
    return bucket if bucket.span_len <= MAX_SPAN and bucket.num_tokens <= MAX_TOKENS else None


def usual_buckets(span_len: int, max_num_seqs: int, max_len: int, page_size: int) -> Iterator[Bucket]:
    """All of them for requests with blocks of `span_len`."""
    widths = dict.fromkeys(_num_pages(num_tokens, page_size) for num_tokens in range(1, max_len + 1))
    for num_spans in dict.fromkeys(map(_num_spans, range(1, max_num_seqs + 1))):
        for num_pages in widths:
            bucket = Bucket(num_spans, _span_len(span_len), num_pages)
            if bucket.num_tokens <= MAX_TOKENS:
                yield bucket


def _num_spans(count: int) -> int:
    """1, 2, 4, 8, 16, 24, 32, ..."""
    return _power(count, 2) if count <= 8 else -(-count // 8) * 8


def _span_len(length: int) -> int:
    return max(8, _power(length, 2))


def _num_pages(num_tokens: int, page_size: int) -> int:
    """Pages for 256, 1024, 4096, ... tokens: a table may be wider than needed at little cost."""
    return -(-max(256, _power(num_tokens, 4)) // page_size)


def _power(number: int, base: int) -> int:
    power = 1
    while power < number:
        power *= base
    return power


class Graphs:
    """One graph per bucket, captured when first wanted."""

    def __init__(self, model: Decoder, cache: KVCache, device: Device) -> None:
        self._model, self._cache, self._device = model, cache, device
        self._graphs: dict[Bucket, Graph] = {}

    def find(self, spans: list[Span]) -> "Graph | None":
        bucket = bucket_of(spans, self._cache.page_size)
        return bucket and self.get(bucket)

    def get(self, bucket: Bucket) -> "Graph":
        if bucket not in self._graphs:
            self._graphs[bucket] = Graph(bucket, self._model, self._cache, self._device)
        return self._graphs[bucket]


class Graph:
    """The model over one bucket's rectangle: row i of it holds span i, then padding."""

    def __init__(self, bucket: Bucket, model: Decoder, cache: KVCache, device: Device) -> None:
        self._bucket, self._attention, self._cache = bucket, model.attention, cache
        self._members: list[tuple] = []
        size = bucket.num_tokens
        self._arrays = {
            "tokens": np.zeros(size, dtype=np.int64),
            "positions": np.zeros(size, dtype=np.int64),
            "store_slots": np.full(size, cache.scratch.index[0]),
        }
        plan = self._plan([])
        assert plan is not None, "an attention that fits graphs reaches the scratch page"
        self._arrays |= plan.arrays
        num_bytes = sum(array.nbytes for array in self._arrays.values())
        self._staging = Staging(device, num_bytes + EXTRA_ROW_BYTES * size + EXTRA_BYTES, grows=False)
        tensors = self._staging.put(self._arrays)
        self._tokens = tensors["tokens"]
        batch = Batch(
            tokens=self._tokens,
            positions=tensors["positions"],
            rows=None,
            store_slots=tensors["store_slots"],
            store_from=None,
            plan=plan,
            index={name: tensors[name] for name in plan.arrays},
        )
        self._replay = device.capture(lambda: model.forward(batch, cache))

    def run(self, spans: list[Span], more: dict[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]] | None:
        """Hidden states [M, d] of the spans' rows; `more` on the device, and the padded batch's tokens and rows.

        None where the attention would have to copy some request's keys: lengths of copies cannot be captured.
        """
        if not self._place(spans):
            return None
        tokens = self._arrays["tokens"].reshape(self._bucket.num_spans, -1)
        for row, span in zip(tokens, spans, strict=False):
            row[: span.end - span.start] = span.tokens[span.start : span.end]
        span_len = self._bucket.span_len
        rows = np.concatenate([span.rows - span.start + i * span_len for i, span in enumerate(spans)])
        wanted = {"rows": rows, **more}
        tensors = self._staging.put(self._arrays | wanted, wanted)
        return self._replay()[tensors["rows"]], tensors | {"tokens": self._tokens}

    def _place(self, spans: list[Span]) -> bool:
        """Where the tokens are; nothing to do while the same requests stay in the same blocks."""
        members = [(span.slots, span.start, span.end) for span in spans if span.slots]
        if members == self._members:
            return True
        plan = self._plan(spans)
        if plan is None:
            return False
        self._members = members
        self._arrays |= plan.arrays
        shape = (self._bucket.num_spans, -1)
        positions = self._arrays["positions"].reshape(shape)
        stores = self._arrays["store_slots"].reshape(shape)
        positions[:], stores[:] = 0, self._cache.scratch.index[0]
        for i, (slots, start, end) in enumerate(members):
            positions[i, : end - start] = np.arange(start, end)
            stores[i, : end - start] = slots.index[start:end]
        return True

    def _plan(self, spans: list[Span]):  # noqa: ANN202  (the attention's own)
        places = [(span.slots, span.num_keys) for span in spans if span.slots is not None]
        scratch = self._cache.scratch
        places += [(scratch, scratch.num_tokens)] * (self._bucket.num_spans - len(places))
        return self._attention.plan_rectangle(places, self._bucket.span_len, self._bucket.num_pages)
