"""Captured steps: cache steps padded to one of few sizes, so that a GPU replays them without the host's launches.

A bucket is a rectangle of spans. What pads it reads and writes the cache's scratch page, and nobody reads its output.
Owns the buckets and their buffers; knows nothing of how a capture is done (device.py) or of requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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
    num_tokens = max(span.num_tokens for span in spans)
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
            with torch.inference_mode():
                self._graphs[bucket] = Graph(bucket, self._model, self._cache, self._device)
        return self._graphs[bucket]


@dataclass(frozen=True, eq=False)
class Seats:
    """The place of some spans in a bucket: what stays the same while they do.

    starts [N]: the token of the rectangle that each begins at. places [T]: where each token of the rectangle is in the
    flat array of canvases; what pads it takes some token. plan: the attention's. arrays: all that the graph reads
    beside the tokens.
    """

    starts: np.ndarray
    places: np.ndarray
    plan: Any
    arrays: dict[str, np.ndarray]


class Graph:
    """The model over one bucket's rectangle: row i of it holds span i, then padding."""

    def __init__(self, bucket: Bucket, model: Decoder, cache: KVCache, device: Device) -> None:
        self._bucket, self._attention, self._cache = bucket, model.attention, cache
        empty = self.seat([])
        assert empty is not None, "an attention that fits graphs reaches the scratch page"
        self._seats = empty  # those whose arrays are on the device
        size = bucket.num_tokens
        arrays = empty.arrays | {"tokens": np.zeros(size, dtype=np.int64)}
        num_bytes = sum(array.nbytes for array in arrays.values())
        self._staging = Staging(device, num_bytes + EXTRA_ROW_BYTES * size + EXTRA_BYTES, grows=False)
        places = self._staging.write(arrays)
        self._staging.upload()
        tensors = self._staging.tensors(places, arrays)
        self._tokens, self._seats_end = tensors["tokens"], places["tokens"]
        batch = Batch(
            tokens=self._tokens,
            positions=tensors["positions"],
            rows=None,
            store_slots=tensors["store_slots"],
            store_from=None,
            plan=empty.plan,
            index={name: tensors[name] for name in empty.plan.arrays},
        )
        self._replay = device.capture(lambda: model.forward(batch, cache))

    def seat(self, spans: list[Span]) -> Seats | None:
        """None where the attention would have to copy some request's keys: lengths of copies cannot be captured."""
        keys = [(span.slots, span.num_keys) for span in spans if span.slots is not None]
        scratch = self._cache.scratch
        keys += [(scratch, scratch.num_tokens)] * (self._bucket.num_spans - len(keys))
        plan = self._attention.plan_rectangle(keys, self._bucket.span_len, self._bucket.num_pages)
        if plan is None:
            return None
        shape = (self._bucket.num_spans, self._bucket.span_len)
        positions, places = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        stores = np.full(shape, self._cache.scratch.index[0])
        for i, span in enumerate(spans):
            assert span.slots is not None, "a bucket has spans that read the cache"
            length = span.end - span.start
            positions[i, :length] = np.arange(span.start, span.end)
            stores[i, :length] = span.slots.index[span.start : span.end]
            places[i, :length] = positions[i, :length] + span.place
        starts = np.arange(len(spans)) * self._bucket.span_len
        arrays = {"positions": positions.reshape(-1), "store_slots": stores.reshape(-1)}
        return Seats(starts, places.reshape(-1), plan, arrays | plan.arrays)

    def run(
        self, seats: Seats, canvases: np.ndarray, rows: np.ndarray, more: dict[str, np.ndarray]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states of `rows`, tokens of the rectangle; `more` on the device, and the rectangle's tokens and rows.

        The device waits until the replay is queued: what can wait comes after it.
        """
        begin = self._seats_end
        if seats is not self._seats:
            self._staging.write(seats.arrays)
            self._seats, begin = seats, 0
        wanted = {"rows": rows, **more}
        places = self._staging.write({"tokens": canvases[seats.places], **wanted}, self._seats_end)
        self._staging.upload(begin)
        hidden = self._replay()
        tensors = self._staging.tensors(places, wanted)
        return hidden[tensors["rows"]], tensors | {"tokens": self._tokens}
