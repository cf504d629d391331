"""Attention through a kernel for ragged batches (FlashAttention's "varlen" interface): one call for many requests.

Spans that are whole canvases attend to the packed keys of the batch itself. Others read their keys from the cache:
in place, through page tables or as runs of neighbouring pages, where the kernel can; else gathered, layer by layer.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve.worker.batch import Segment
from dlmserve.worker.kv_cache import KVCache, Slots

# FlashAttention 2 reads a page table only where this divides the page size.
FLASH_PAGE = 256


@dataclass(frozen=True)
class Kernel:
    """`run(q, k, v, cu_q, cu_k, max_q, max_k, used_k, table)` attends span i of q [T, H, D], the tokens cu_q[i] to
    cu_q[i + 1], to its keys. Those begin at cu_k[i] of k [S, KVH, D] and are cu_k[i + 1] - cu_k[i], or used_k[i].
    With a table [N, P] k is [pages, page_size, KVH, D], and the keys are used_k[i] tokens of the pages table[i].
    Integers are int32. Returns [T, H, D].
    """

    name: str
    run: Callable[..., Tensor]
    reads_runs: bool  # takes used_k: keys may lie anywhere in k, in ascending order
    reads_pages: bool  # takes a table


@dataclass(frozen=True)
class VarlenPlan:
    """The first `num_cached` packed tokens (`num_cached_rows` wanted rows) read the cache, the rest each other."""

    num_cached: int = 0
    num_cached_rows: int = 0
    max_q: int = 0  # of the spans that read the cache
    max_rows: int = 0
    max_k: int = 0
    max_fresh: int = 0  # of the spans that do not
    max_fresh_rows: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class VarlenAttention:
    def __init__(self, kernel: Kernel, page_size: int) -> None:
        self._kernel, self._page_size = kernel, page_size

    @property
    def details(self) -> str:
        if self._kernel.reads_pages:
            return f"{self._kernel.name}, paged K/V read in place"
        if self._kernel.reads_runs:
            return (
                f"{self._kernel.name}, K/V of neighbouring pages read in place, others gathered at each layer"
            )
        return (
            f"{self._kernel.name}, K/V gathered at each layer (it reads pages in place only where --page-size is a "
            f"multiple of {FLASH_PAGE})"
        )

    @property
    def fits_graphs(self) -> bool:
        return self._kernel.reads_pages or self._kernel.reads_runs

    def plan(self, segments: list[Segment]) -> VarlenPlan:
        cached = [segment for segment in segments if segment.slots is not None]
        fresh = segments[len(cached) :]
        assert all(segment.slots is None for segment in fresh), "spans that read the cache come first"
        places = [(segment.slots, segment.num_keys) for segment in cached if segment.slots is not None]
        spans, rows = _lengths(cached)
        fresh_spans, fresh_rows = _lengths(fresh)
        arrays = self._places_of_keys(places) if cached else {}
        arrays |= {"cached_q": _cumulative(spans), "cached_rows": _cumulative(rows)} if cached else {}
        arrays |= (
            {"fresh_q": _cumulative(fresh_spans), "fresh_rows": _cumulative(fresh_rows)} if fresh else {}
        )
        return VarlenPlan(
            num_cached=sum(spans),
            num_cached_rows=sum(rows),
            max_q=max(spans, default=0),
            max_rows=max(rows, default=0),
            max_k=max((num_keys for _, num_keys in places), default=0),
            max_fresh=max(fresh_spans, default=0),
            max_fresh_rows=max(fresh_rows, default=0),
            arrays=arrays,
        )

    def plan_rectangle(
        self, places: list[tuple[Slots, int]], span_len: int, num_pages: int
    ) -> VarlenPlan | None:
        arrays = self._places_of_keys(places, num_pages)
        if "gather" in arrays:
            return None
        num_tokens = len(places) * span_len
        arrays["cached_q"] = np.arange(0, num_tokens + 1, span_len, dtype=np.int32)
        return VarlenPlan(
            num_cached=num_tokens, max_q=span_len, max_k=num_pages * self._page_size, arrays=arrays
        )

    def _places_of_keys(self, places: list[tuple[Slots, int]], width: int = 0) -> dict[str, np.ndarray]:
        """Page tables (`width` columns or more), runs or indices to gather, whichever is the cheapest possible."""
        slots = [each for each, _ in places]
        used = np.array([num_keys for _, num_keys in places], dtype=np.int32)
        if self._kernel.reads_pages:
            width = max(width, *(len(each.pages) for each in slots))
            table = np.zeros((len(slots), width), dtype=np.int32)
            for row, each in zip(table, slots, strict=True):
                row[: len(each.pages)] = each.pages
            return {"used_k": used, "cached_k": _cumulative(used), "table": table}
        if not self._kernel.reads_runs:
            gather = np.concatenate([each.index[:num_keys] for each, num_keys in places])
            return {"cached_k": _cumulative(used), "gather": gather}
        starts = [each.start for each in slots if each.start is not None]
        gathered: dict[str, np.ndarray] = {}
        if len(starts) < len(slots):
            whole = list(dict.fromkeys(slots))  # once each: blocks of one canvas share its keys
            first = dict(zip(whole, _cumulative([each.num_tokens for each in whole]).tolist(), strict=False))
            starts = [first[each] for each in slots]
            gathered = {"gather": np.concatenate([each.index for each in whole])}
        ends = np.array([*starts, starts[-1] + used[-1]], dtype=np.int32)
        return {"used_k": used, "cached_k": ends} | gathered

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: VarlenPlan,
        index: dict[str, Tensor],
        cache: KVCache | None,
        layer: int,
        only_rows: bool,
    ) -> Tensor:
        queries = "rows" if only_rows else "q"
        out = []
        num_cached = plan.num_cached_rows if only_rows else plan.num_cached
        if plan.num_cached:
            assert cache is not None
            max_q = plan.max_rows if only_rows else plan.max_q
            keys, values = cache.layer(layer)
            table, gather = index.get("table"), index.get("gather")
            if table is not None:
                keys, values = cache.paged(keys), cache.paged(values)
            elif gather is not None:
                keys, values = keys[gather], values[gather]
            places = (index[f"cached_{queries}"], index["cached_k"], max_q, plan.max_k)
            out.append(self._kernel.run(q[:num_cached], keys, values, *places, index.get("used_k"), table))
        if plan.max_fresh:
            max_q = plan.max_fresh_rows if only_rows else plan.max_fresh
            keys, values = k[plan.num_cached :], v[plan.num_cached :]
            places = (index[f"fresh_{queries}"], index["fresh_q"], max_q, plan.max_fresh)
            out.append(self._kernel.run(q[num_cached:], keys, values, *places, None, None))
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1)


def _lengths(segments: list[Segment]) -> tuple[list[int], list[int]]:
    return [s.end - s.start for s in segments], [s.row_end - s.row_start for s in segments]


def _cumulative(lengths: list[int] | np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def flash_kernel(page_size: int) -> Kernel:
    """The flash-attn package (Dao, 2023). Raises ImportError where it is not installed."""
    varlen = importlib.import_module("flash_attn").flash_attn_varlen_func

    def run(q, k, v, cu_q, cu_k, max_q, max_k, used_k, table):  # noqa: ANN001, ANN202
        return varlen(q, k, v, cu_q, cu_k, max_q, max_k, block_table=table)

    return Kernel("flash-attn", run, reads_runs=False, reads_pages=page_size % FLASH_PAGE == 0)


def torch_kernel(page_size: int) -> Kernel:
    """torch.nn.attention.varlen, which takes page tables from torch 2.13 on. Raises ImportError before 2.10.

    Older ones hide FlashAttention's `seqused_k`: there the operator below it is called.
    """
    varlen: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    known = inspect.signature(varlen).parameters

    def run(q, k, v, cu_q, cu_k, max_q, max_k, used_k, table):  # noqa: ANN001, ANN202
        grouped = q.shape[1] != k.shape[-2]
        more = {"enable_gqa": grouped, "seqused_k": used_k, "block_table": table}
        return varlen(q, k, v, cu_q, cu_k, max_q, max_k, **more)

    def run_operator(q, k, v, cu_q, cu_k, max_q, max_k, used_k, table):  # noqa: ANN001, ANN202
        places = (cu_q, cu_k, max_q, max_k)
        return torch.ops.aten._flash_attention_forward(
            q, k, v, *places, dropout_p=0.0, is_causal=False, return_debug_mask=False, seqused_k=used_k
        )[0]

    if {"block_table", "seqused_k", "enable_gqa"} <= known.keys():
        return Kernel("torch varlen_attn", run, reads_runs=True, reads_pages=page_size % FLASH_PAGE == 0)
    return Kernel("torch's flash attention", run_operator, reads_runs=True, reads_pages=False)


def plain_kernel(reads_runs: bool = True, reads_pages: bool = True) -> Kernel:
    """What the kernels compute, in plain torch, span by span: for CPUs, where it shows that the rest is right."""

    def run(q, k, v, cu_q, cu_k, max_q, max_k, used_k, table):  # noqa: ANN001, ANN202
        out = torch.empty_like(q)
        starts = cu_k.tolist()
        counts = cu_k.diff().tolist() if used_k is None else used_k.tolist()
        bounds = cu_q.tolist()
        for i, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            here = slice(starts[i], starts[i] + counts[i])
            keys, values = (
                (k[here], v[here])
                if table is None
                else (x[table[i].long()].flatten(0, 1)[: counts[i]] for x in (k, v))
            )
            assert end - begin <= max_q and counts[i] <= max_k
            if begin == end:  # a block without a wanted row
                continue
            out[begin:end] = F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q[begin:end], keys, values)),
                enable_gqa=q.shape[1] != keys.shape[1],
            )[0].transpose(0, 1)
        return out

    return Kernel("varlen in plain torch", run, reads_runs, reads_pages)
