"""Latency of a step against the packed tokens of its batch, beside the published table for LLaDA-8B on an H100.

Up to 1024 tokens: cache steps, blocks of 32 on canvases of 512. Above: recompute steps, canvases of at most 1024.
"""

import csv
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from bench.gpu.setup import Setting, admit, make_engine
from dlmserve.messages import Cancel
from dlmserve.worker.engine import Engine

TABLE = Path(__file__).parent.parent / "data" / "llada8b_h100_step_ms.csv"
BLOCK, CANVAS, WHOLE = 32, 512, 1024
MAX_CACHE_TOKENS = 1024
# Of the matrices of LLaDA-8B that every token goes through, without embedding and head.
WEIGHTS_PER_TOKEN = 32 * (4 * 4096 * 4096 + 3 * 4096 * 12288)


def published() -> dict[int, float]:
    """Packed tokens -> milliseconds on one H100."""
    with TABLE.open() as file:
        return {int(row["tokens"]): float(row["tp1_ms"]) for row in csv.DictReader(file)}


def measure(setting: Setting) -> dict:
    table = published()
    sizes = list(table) if not setting.small else [32, 1536]
    engine, clock = make_engine(setting, max_num_seqs=MAX_CACHE_TOKENS // BLOCK, max_model_len=WHOLE)
    rows = []
    for num_tokens in sizes:
        _admit_all(setting, engine, num_tokens)
        engine.step()  # the first step of a block is a recompute step
        engine.step()
        clock.marks.clear()
        walls = []
        for _ in range(setting.size(20, 4)):
            began_at = time.perf_counter()
            result = engine.step()
            walls.append(time.perf_counter() - began_at)
            assert abs(result.num_tokens - num_tokens) <= num_tokens // WHOLE
        step_s, busy_s, idle_s = median(walls), median(clock.busy_s()), median(clock.idle_s())
        host = [host_s(engine) for _ in range(4)] if setting.on_gpu else []
        rows.append(
            {
                "tokens": num_tokens,
                "kind": "cache" if num_tokens <= MAX_CACHE_TOKENS else "recompute",
                "step_ms": 1e3 * step_s,
                "device_ms": 1e3 * busy_s,
                "idle_ms": 1e3 * idle_s,
                "critical_us": 1e6 * median(critical for critical, _ in host) if host else None,
                "host_us": 1e6 * median(whole for _, whole in host) if host else None,
                "h100_ms": table[num_tokens],
                "tflops": 2e-12 * num_tokens * WEIGHTS_PER_TOKEN / busy_s if not setting.small else None,
            }
        )
        _cancel_all(engine)
    return {"details": engine.details, "rows": rows, "hidden_syncs": _hidden_syncs(setting, engine)}


def host_s(engine: Engine) -> tuple[float, float]:
    """The host's seconds between two steps while the device idles, from an outcome's arrival until the next step's
    inputs are on their way, and its seconds for a step in all, without its wait. Takes two steps.
    """
    device, uploaded_at = engine._runner.device, list[float]()
    upload = device.upload

    def noted_upload(host: Tensor, device: Tensor) -> None:
        upload(host, device)
        uploaded_at.append(time.perf_counter())

    engine.launch()
    device.wait()
    arrived_at = time.perf_counter()
    record = engine.finish()
    device.upload = noted_upload
    engine.launch()
    record.result()
    done_at = time.perf_counter()
    device.upload = upload
    device.wait()
    engine.finish()
    return uploaded_at[0] - arrived_at, done_at - arrived_at


def _admit_all(setting: Setting, engine: Engine, num_tokens: int) -> None:
    if num_tokens <= MAX_CACHE_TOKENS:
        for request in range(num_tokens // BLOCK):
            engine.apply(admit(setting, request, CANVAS - BLOCK, BLOCK, BLOCK, BLOCK, "dual"))
        return
    count = -(-num_tokens // WHOLE)
    for request in range(count):
        engine.apply(admit(setting, request, num_tokens // count - BLOCK, BLOCK, BLOCK, BLOCK, "none"))


def _cancel_all(engine: Engine) -> None:
    for request in range(MAX_CACHE_TOKENS // BLOCK):
        engine.apply(Cancel(request))


def _hidden_syncs(setting: Setting, engine: Engine) -> str:
    """What torch says where starting a cache step makes the host wait for the device."""
    _admit_all(setting, engine, 128)
    engine.step()
    engine.step()
    found = "none" if setting.on_gpu else "not checked: no GPU"
    if setting.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        engine.launch()
    except RuntimeError as error:
        found = str(error).split("\n")[0]
    finally:
        if setting.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    engine.finish()
    _cancel_all(engine)
    return found


def lines(result: dict) -> list[str]:
    out = [result["details"], f"hidden waits in launch(): {result['hidden_syncs']}"]
    out.append(
        f"{'tokens':>7} {'kind':10}{'step ms':>9}{'device':>9}{'idle':>8}{'crit us':>9}{'host us':>9}{'H100':>8}"
        f"{'ratio':>7}{'TFLOP/s':>9}"
    )
    for row in result["rows"]:
        tflops = f"{row['tflops']:9.0f}" if row["tflops"] else ""
        host = f"{row['critical_us']:9.0f}{row['host_us']:9.0f}" if row["host_us"] else f"{'':18}"
        out.append(
            f"{row['tokens']:7d} {row['kind']:10}{row['step_ms']:9.2f}{row['device_ms']:9.2f}{row['idle_ms']:8.3f}"
            f"{host}{row['h100_ms']:8.1f}{row['h100_ms'] / row['step_ms']:7.2f}{tflops}"
        )
    return out
