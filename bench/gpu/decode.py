"""Tokens per second at several batch sizes, with a dual cache and a modelled unmask rate, against a plain loop.

The lengths are those of 5-shot GSM8K; a fixed schedule gives 3.2 tokens a step, about what threshold 0.9 gives there.
The plain loop is `bench.baseline` on the same random weights: one request at a time, softmax of all logits in float64.
"""

import time
from statistics import median

import torch

from bench.baseline import ROOT, PlainModel, decode, llada_shapes
from bench.gpu.setup import Setting, admit, make_engine
from dlmserve.worker.weights import Ask, DummyWeights

BLOCK, STEPS_PER_BLOCK = 32, 10


def measure(setting: Setting, deadline_at: float) -> dict:
    """Batches that would begin after `deadline_at` (time.perf_counter) are left out."""
    prompt_len, output_len = setting.size(1075, 40), setting.size(256, 64)
    batches = (1, 2) if setting.small else (1, 8, 32, 64)
    plain = plain_loop(setting, prompt_len, output_len)
    engine, clock = make_engine(setting, max(batches), prompt_len + output_len)
    rows = []
    for batch in batches:
        if time.perf_counter() > deadline_at:
            break
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for request in range(batch):
            engine.apply(admit(setting, request, prompt_len, output_len, BLOCK, STEPS_PER_BLOCK, "dual"))
        clock.marks.clear()
        began_at = time.perf_counter()
        num_steps = 0
        while engine.has_work():
            engine.step()
            num_steps += 1
        elapsed_s = time.perf_counter() - began_at
        rate = batch * output_len / elapsed_s
        rows.append(
            {
                "batch": batch,
                "tokens_per_s": rate,
                "ratio": rate / plain["tokens_per_s"],
                "steps": num_steps,
                "idle_ms": 1e3 * median(clock.idle_s()),
                "idle_share": sum(clock.idle_s()) / elapsed_s,
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if setting.on_gpu else None,
            }
        )
    return {"details": engine.details, "plain": plain, "rows": rows, "left_out": list(batches[len(rows) :])}


def plain_loop(setting: Setting, prompt_len: int, output_len: int) -> dict:
    source = DummyWeights(setting.dtype, setting.device)
    shapes = llada_shapes(setting.config)
    model = PlainModel(setting.config, {name: source.get(Ask(ROOT + name, shapes[name])) for name in shapes})
    first = admit(setting, 0, prompt_len, output_len, BLOCK, STEPS_PER_BLOCK, "dual")
    rates = []
    for _ in range(2):  # the first warms up
        began_at = time.perf_counter()
        decode(model, first.canvas[:prompt_len], output_len, BLOCK, 0.0, "dual", STEPS_PER_BLOCK)
        rates.append(output_len / (time.perf_counter() - began_at))
    return {
        "tokens_per_s": rates[-1],
        "steps_per_block": STEPS_PER_BLOCK,
        "prompt": prompt_len,
        "output": output_len,
    }


def lines(result: dict) -> list[str]:
    plain = result["plain"]
    out = [
        f"prompt {plain['prompt']}, output {plain['output']}, {plain['steps_per_block']} steps per block of {BLOCK}; "
        f"plain loop: {plain['tokens_per_s']:.1f} tokens/s",
        f"{'batch':>6}{'tokens/s':>11}{'ratio':>8}{'steps':>7}{'idle ms':>9}{'idle':>7}{'peak GiB':>10}",
    ]
    for row in result["rows"]:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:10.1f}"
        out.append(
            f"{row['batch']:6d}{row['tokens_per_s']:11.1f}{row['ratio']:8.2f}{row['steps']:7d}{row['idle_ms']:9.3f}"
            f"{row['idle_share']:7.1%}{peak}"
        )
    return out + [f"left out for lack of time: {result['left_out']}"] * bool(result["left_out"])
