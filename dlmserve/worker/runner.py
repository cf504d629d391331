"""Runs the model over the spans of a step: packed as they are, or in a captured graph's place for them.

Owns the step's copy to the device. Knows nothing of requests or of what is done with hidden states.
"""

import numpy as np
from torch import Tensor

from dlmserve.worker.batch import Span, on_device, pack
from dlmserve.worker.device import Device, Staging
from dlmserve.worker.graphs import Graphs
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.models.decoder import Decoder


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

    def run(self, spans: list[Span], more: dict[str, np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
        """Hidden states [M, d] of the spans' rows, and arrays on the device, which all go there in one copy.

        Those are `more` and, of the batch, "tokens" [T] and "rows" [M], which index them. Names in `more` contain
        a dot. Spans come in ascending `order`.
        """
        spans = [part for span in spans for part in span.by_blocks()]
        graph = self._graphs.find(spans) if self._graphs else None
        if graph and (done := graph.run(spans, more)):
            self.num_replays += 1
            return done
        packed = pack(spans, self.model.attention.plan)
        tensors = self._staging.put(packed.arrays | more)
        return self.model.forward(on_device(packed, tensors), self.cache), tensors

    def close(self) -> None:
        """Before the group is left: a graph may hold collectives of it."""
        self.device.wait()
        self._graphs = None
