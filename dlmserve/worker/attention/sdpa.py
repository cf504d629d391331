"""Attention by one scaled-dot-product call per request, on views of its cache.

For CPUs, and for GPUs where nothing better works. Padding the requests to one rectangle would cost up to five times
more when one of them recomputes its whole canvas; one call for requests of equal lengths would copy their keys first,
which costs more than the calls it saves. Blocks of one block-causal request share a call, with a mask.
"""

from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve.worker.batch import Segment
from dlmserve.worker.kv_cache import KVCache, Slots


@dataclass(frozen=True)
class SdpaPlan:
    """One segment per request. `arrays`, where some see fewer keys than others of their request: "num_keys" of each
    packed token, "num_row_keys" of each wanted row."""

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
        requests = [
            list(group) for _, group in groupby(segments, lambda segment: id(segment.slots or segment))
        ]
        if len(requests) == len(segments):
            return SdpaPlan(segments)
        merged = [
            replace(blocks[-1], start=blocks[0].start, row_start=blocks[0].row_start) for blocks in requests
        ]
        keys = np.array([segment.num_keys for segment in segments])
        return SdpaPlan(
            merged,
            {
                "num_keys": keys.repeat([segment.end - segment.start for segment in segments]),
                "num_row_keys": keys.repeat([segment.row_end - segment.row_start for segment in segments]),
            },
        )

    def plan_rectangle(self, places: list[tuple[Slots, int]], span_len: int, num_pages: int) -> None:
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
        limits = index.get("num_row_keys" if only_rows else "num_keys")
        for segment in plan.segments:
            if segment.slots is None:
                keys, values = k[segment.start : segment.end], v[segment.start : segment.end]
            else:
                assert cache is not None
                keys, values = (x[: segment.num_keys] for x in cache.read(layer, segment.slots))
            mine = segment.rows if only_rows else slice(segment.start, segment.end)
            seen = None
            if limits is not None:
                seen = torch.arange(len(keys), device=q.device) < limits[mine, None]
            out[mine] = F.scaled_dot_product_attention(
                q[mine].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=seen,
                enable_gqa=grouped,
            )[0].transpose(0, 1)
        return out.flatten(1)
