"""Each attention back end that works on the device against the plain one, on the K/V of a real batch.

32 cache spans of 32 queries beside one whole canvas, keys in neighbouring and in scattered pages; LLaDA-8B's heads.
"""

from statistics import median

import numpy as np
import torch

from bench.gpu.setup import Setting, seconds
from dlmserve.errors import ConfigError
from dlmserve.worker.attention import Attention, choose
from dlmserve.worker.attention.varlen import VarlenAttention, plain_kernel
from dlmserve.worker.batch import Span, pack
from dlmserve.worker.device import Staging, make_device
from dlmserve.worker.kv_cache import KVCache, Slots


def measure(setting: Setting) -> dict:
    rows = []
    for page_size in (32, 256):
        for scattered in (False, True):
            rows += _compare(setting, page_size, scattered)
    return {"rows": rows}


def _compare(setting: Setting, page_size: int, scattered: bool) -> list[dict]:
    heads, head_dim = setting.config["n_heads"], setting.config["d_model"] // setting.config["n_heads"]
    count, length = setting.size(32, 2), setting.size(1331, 100)
    cache = _filled_cache(setting, heads, head_dim, page_size, count * 2 * -(-length // page_size))
    spans = _spans(cache, count, length, scattered)
    wanted = None
    rows = []
    for name in ("plain", "flash", "varlen", "sdpa"):
        try:
            attention = _back_end(name, setting, head_dim, page_size)
        except ConfigError as error:
            rows.append({"name": name, "page_size": page_size, "scattered": scattered, "error": str(error)})
            continue
        ends = np.cumsum([span.end - span.start for span in spans])
        packed = pack(spans, np.zeros(length, dtype=np.int64), ends - 1, attention.plan)
        index = Staging(make_device(setting.device)).put(packed.arrays)
        shape = (packed.num_tokens, heads, head_dim)
        generator = torch.Generator(setting.device).manual_seed(1)
        q, k, v = (
            torch.empty(shape, dtype=setting.dtype, device=setting.device).normal_(generator=generator)
            for _ in "qkv"
        )

        def run(attention: Attention = attention, q=q, k=k, v=v, packed=packed, index=index):  # noqa: ANN001, ANN202
            return attention.attend(q, k, v, packed.plan, index, cache, 0, only_rows=False)

        out = run().float()
        wanted = out if wanted is None else wanted
        num_bytes = 2 * count * length * heads * head_dim * setting.dtype.itemsize
        rows.append(
            {
                "name": name,
                "details": attention.details,
                "page_size": page_size,
                "scattered": scattered,
                "us": 1e6 * median(seconds(setting, run, setting.size(20, 2))),
                "kv_bytes": num_bytes,
                "error_to_plain": float((out - wanted).norm() / wanted.norm()),
            }
        )
    return rows


def _back_end(name: str, setting: Setting, head_dim: int, page_size: int) -> Attention:
    if name == "plain":
        return VarlenAttention(plain_kernel(), page_size)
    return choose(name, setting.device, setting.dtype, head_dim, page_size)


def _filled_cache(setting: Setting, heads: int, head_dim: int, page_size: int, num_pages: int) -> KVCache:
    cache = KVCache(1, num_pages, page_size, heads, head_dim, setting.dtype, setting.device)
    for tensor in cache.layer(0):
        tensor.normal_(generator=torch.Generator(setting.device).manual_seed(2))
    return cache


def _spans(cache: KVCache, count: int, length: int, scattered: bool) -> list[Span]:
    """`scattered`: each canvas has every second page of a run."""
    spans = []
    for request in range(count):
        slots = cache.reserve(request, 2 * length if scattered else length)
        if scattered:
            slots = _every_second_page(cache, slots, length)
        spans.append(Span(0, length, length - 32, length, slots))
    spans.append(Span(0, length, 0, length, None))
    return sorted(spans, key=lambda span: span.order)


def _every_second_page(cache: KVCache, slots: Slots, length: int) -> Slots:
    pages = slots.pages[::2]
    index = (np.array(pages)[:, None] * cache.page_size + np.arange(cache.page_size)).reshape(-1)[:length]
    return Slots(index, None, pages, torch.from_numpy(index).to(cache.layer(0)[0].device))


def lines(result: dict) -> list[str]:
    out = [f"{'attention':10}{'page':>5} {'pages':11}{'us':>10}{'K/V GB/s':>10}{'error':>10}"]
    for row in result["rows"]:
        pages = "scattered" if row["scattered"] else "neighbours"
        head = f"{row['name']:10}{row['page_size']:5d} {pages:11}"
        if "error" in row:
            out.append(head + row["error"])
            continue
        rate = row["kv_bytes"] / row["us"] / 1e3
        out.append(f"{head}{row['us']:10.1f}{rate:10.0f}{row['error_to_plain']:10.1e}  {row['details']}")
    return out
