"""Attention of packed spans over each request's own keys: bidirectional, grouped-query, no mask.

One scaled-dot-product call per request on views of its cache. Padding the requests to one rectangle would cost
up to five times more when one of them recomputes its whole canvas.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve.worker.batch import Segment
from dlmserve.worker.kv_cache import KVCache


def attend(
    q: Tensor, k: Tensor, v: Tensor, segments: list[Segment], cache: KVCache | None, layer: int
) -> Tensor:
    """q [T, H, D] of the segments' queries; k, v [S, KVH, D] of the packed spans. Returns [T, H * D]."""
    out = torch.empty_like(q)
    grouped = q.shape[1] != k.shape[1]
    for segment in segments:
        if segment.slots is None:
            keys, values = k[segment.key_start : segment.key_end], v[segment.key_start : segment.key_end]
        else:
            assert cache is not None
            keys, values = cache.read(layer, segment.slots)
        queries = q[segment.start : segment.end]
        out[segment.start : segment.end] = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            enable_gqa=grouped,
        )[0].transpose(0, 1)
    return out.flatten(1)
