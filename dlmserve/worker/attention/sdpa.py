"""Attention by one scaled-dot-product call per request, on views of its cache.

For CPUs, and for GPUs where nothing better works. Padding the requests to one rectangle would cost up to five times
more when one of them recomputes its whole canvas; one call for requests of equal lengths would copy their keys first,
which costs more than the calls it saves.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve.worker.batch import Segment
from dlmserve.worker.kv_cache import KVCache, Slots


@dataclass(frozen=True)
class SdpaPlan:
    segments: list[Segment]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class SdpaAttention:
    """`why`: what keeps a GPU from better."""

    fits_graphs = False  # the calls, one per request, would be captured with their lengths

    def __init__(self, why: str = "") -> None:
        self._why = why

    @property
    def details(self) -> str:
        return "sdpa per request" + (f" (flash attention: {self._why})" if self._why else "")

    def plan(self, segments: list[Segment]) -> SdpaPlan:
        return SdpaPlan(segments)

    def plan_rectangle(self, slots: list[Slots], span_len: int, num_pages: int) -> None:
        return None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: SdpaPlan,
        index: dict[str, Tensor],
        cache: KVCache | None,
        layer: int,
        only_rows: bool,
    ) -> Tensor:
        out = torch.empty_like(q)
        grouped = q.shape[1] != k.shape[1]
        for segment in plan.segments:
            if segment.slots is None:
                keys, values = k[segment.start : segment.end], v[segment.start : segment.end]
            else:
                assert cache is not None
                keys, values = cache.read(layer, segment.slots)
            mine = segment.rows if only_rows else slice(segment.start, segment.end)
            out[mine] = F.scaled_dot_product_attention(
                q[mine].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                enable_gqa=grouped,
            )[0].transpose(0, 1)
        return out.flatten(1)
