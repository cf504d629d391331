"""Runs the model over the spans of a step: packed as they are, or in a captured graph's place for them.

Owns the step's copy to the device. Knows nothing of requests or of what is done with hidden states.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dlmserve.worker.batch import Span, on_device, pack, starts_of
from dlmserve.worker.device import Device, Staging
from dlmserve.worker.graphs import Graph, Graphs, Seats
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.models.decoder import Decoder


@dataclass(frozen=True)
class Placement:
    """Where spans are in a batch. starts [N]: column c of a span's last block is token starts + c - span.start of it.

    parts: the spans, of block-causal models cut into blocks, as they follow each other in the batch.
    """

    spans: list[Span]
    parts: list[Span]
    starts: np.ndarray
    graph: tuple[Graph, Seats] | None  # None: they are packed


class Runner:
    """`graphs` None: none are used. num_replays counts the steps that a graph did."""

    def __init__(self, model: Decoder, cache: KVCache, device: Device, graphs: Graphs | None) -> None:
        self.model, self.cache, self.device = model, cache, device
        self.num_replays = 0
        self._graphs = graphs
        self._staging = Staging(device)

    @property
    def details(self) -> str:
        graphs = "no graphs" if self._graphs is None else "graphs of cache steps"
        return f"attention {self.model.attention.details}, {graphs}{self.model.details}"

    def place(self, spans: list[Span]) -> Placement:
        """Whatever can be done for a step before its tokens are known. Spans come in ascending `order`."""
        parts, last = list[Span](), list[int]()
        for span in spans:
            parts += span.by_blocks()
            last.append(len(parts) - 1)
        graph = self._graphs.find(parts) if self._graphs else None
        seats = graph.seat(parts) if graph else None
        starts = (seats.starts if seats else starts_of(parts))[last]
        starts = starts - [parts[at].start - span.start for at, span in zip(last, spans, strict=True)]
        return Placement(spans, parts, starts, (graph, seats) if graph and seats else None)

    def run(
        self, placement: Placement, canvases: np.ndarray, rows: np.ndarray, more: dict[str, np.ndarray]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states [M, d] of the wanted rows, and arrays on the device, which all go there in one copy.

        canvases: the flat array that the spans are of. rows [M]: tokens of the batch, in ascending order. The arrays
        are `more` and, of the batch, "tokens" [T] and "rows" [M]. Names in `more` contain a dot.
        """
        if placement.graph:
            graph, seats = placement.graph
            self.num_replays += 1
            return graph.run(seats, canvases, rows, more)
        packed = pack(placement.parts, canvases, rows, self.model.attention.plan)
        tensors = self._staging.put(packed.arrays | more)
        return self.model.forward(on_device(packed, tensors), self.cache), tensors

    def close(self) -> None:
        """Before the group is left: a graph may hold collectives of it."""
        self.device.wait()
        self._graphs = None
