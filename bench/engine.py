"""Tokens per second of the engine against a plain dual-cache loop, in one run, on a random checkpoint.

    python -m bench.engine [--json bench/results/engine_cpu.json]

8 layers, d 512, vocabulary 32k, 8 prompts of 64 tokens, output 128, blocks of 32, threshold 0.9; float32; all cores
for both. The plain loop and batch 1 take the prompts one after another, batch 8 all at once. Same tokens out of all
three is checked. The runs are interleaved; ratios are of medians. With 8 prompts the engine has about 2 Tflop to do
(dual cache), so what the cores can do together bounds batch 8: two that are threads of one core share its
multiply-adds.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from bench import baseline, report
from bench.baseline import PlainModel, decode
from dlmserve import LLM, DecodingParams
from dlmserve.messages import CacheMode

CONFIG = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "d_model": 512,
    "n_heads": 8,
    "n_kv_heads": 8,
    "n_layers": 8,
    "mlp_hidden_size": 1536,
    "vocab_size": 32768,
    "embedding_size": 32768,
    "max_sequence_length": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32766,
    "mask_token_id": 32767,
}
PROMPT, OUTPUT, BLOCK, THRESHOLD = 64, 128, 32, 0.9


def write_checkpoint(folder: str, seed: int) -> None:
    """Random weights, scaled so that confidences spread and a step unmasks one to a few tokens."""
    c, random = CONFIG, np.random.default_rng(seed)
    d, mlp, vocab = c["d_model"], c["mlp_hidden_size"], c["vocab_size"]

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return random.standard_normal((rows, columns), dtype=np.float32) * (scale / math.sqrt(columns))

    root = "model.transformer."
    tensors = {
        f"{root}wte.weight": matrix(vocab, d, math.sqrt(d)),
        f"{root}ff_out.weight": matrix(vocab, d, 10.0),
    }
    tensors[f"{root}ln_f.weight"] = np.ones(d, dtype=np.float32)
    for i in range(c["n_layers"]):
        block = f"{root}blocks.{i}."
        tensors |= {f"{block}{n}.weight": np.ones(d, dtype=np.float32) for n in ("attn_norm", "ff_norm")}
        tensors |= {f"{block}{n}.weight": matrix(d, d) for n in ("q_proj", "k_proj", "v_proj", "attn_out")}
        tensors |= {f"{block}{n}.weight": matrix(mlp, d) for n in ("ff_proj", "up_proj")}
        tensors[f"{block}ff_out.weight"] = matrix(d, mlp)
    tensors[f"{root}ff_out.weight"][c["mask_token_id"]] = 0.0
    Path(folder, "config.json").write_text(json.dumps(c))
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})


def timed(run: Callable[[], list[list[int]]], times: list[float]) -> list[list[int]]:
    start = time.perf_counter()
    out = run()
    times.append(time.perf_counter() - start)
    return out


def measure(llm: LLM, plain: PlainModel, cache: CacheMode, prompts: list[list[int]], repeats: int) -> dict:
    params = DecodingParams(
        gen_length=OUTPUT, block_length=BLOCK, threshold=THRESHOLD, cache=cache, ignore_eos=True
    )  # type: ignore[arg-type]
    runs: dict[str, Callable[[], list[list[int]]]] = {
        "baseline": lambda: [decode(plain, prompt, OUTPUT, BLOCK, THRESHOLD, cache) for prompt in prompts],
        "batch_1": lambda: [c.token_ids for prompt in prompts for c in llm.generate([prompt], params)],
        "batch_8": lambda: [c.token_ids for c in llm.generate(prompts, params)],
    }
    steps = [len(c.steps) for c in llm.generate(prompts, params)]  # warms up as well
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        out = {name: timed(run, times[name]) for name, run in runs.items()}
    num_tokens = len(prompts) * OUTPUT
    rates = {name: report.spread([num_tokens / t for t in samples]) for name, samples in times.items()}
    base = rates["baseline"]["median"]
    return {
        "tokens_per_s": rates,
        "ratio": {name: rates[name]["median"] / base for name in ("batch_1", "batch_8")},
        "same_tokens": out["baseline"] == out["batch_1"] == out["batch_8"],
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--caches", nargs="+", default=["dual", "prefix", "none"])
    args = parser.parse_args()
    random = np.random.default_rng(args.seed + 1)
    prompts = [random.integers(0, 32000, PROMPT).tolist() for _ in range(8)]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, args.seed)
        plain, llm = baseline.load(folder), LLM(folder)
        print(f"{torch.get_num_threads()} threads; {llm.details}")
        print(f"{'cache':8}{'plain':>10}{'batch 1':>18}{'batch 8':>18}   tokens/s (ratio to plain)")
        for cache in args.caches:
            r = results[cache] = measure(llm, plain, cache, prompts, args.repeats)
            t = {name: f"{s['median']:.1f}" for name, s in r["tokens_per_s"].items()}
            cells = [f"{t[n]} ({r['ratio'][n]:.2f}x)" for n in ("batch_1", "batch_8")]
            same = "same tokens" if r["same_tokens"] else "TOKENS DIFFER"
            print(
                f"{cache:8}{t['baseline']:>10}{cells[0]:>18}{cells[1]:>18}   {sum(r['steps'])} steps, {same}"
            )
    if args.json:
        report.write(args.json, args.seed, results)


if __name__ == "__main__":
    main()
