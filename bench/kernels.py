"""The CPU kernels against torch, on one thread, in one process: medians of interleaved repeats.

    python -m bench.kernels [--full] [--json bench/results/kernels_cpu.json]

"torch" is the product, a float32 softmax and the maximum; for bf16 weights the product is in bf16 too.
"onednn" is the same with the weights in oneDNN's packed layout (float32 only). Times are CPU time of the
thread, so that other load on the machine counts for less. The bound of a shape is the larger of its bytes
(weights read once, at the bandwidth of a copy) and its operations (at the measured multiply-add peak).
"wrong": rows whose arg-max is not that of float64 logits.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import report
from dlmserve import kernels
from dlmserve.worker.linear import Linear

F32, BF16 = torch.float32, torch.bfloat16
# vocabulary, width, type, rows; the last ones are the widths of LLaDA-8B and Dream-7B.
HEADS = [
    (1088, 128, F32, (1, 4, 16, 64)),
    (32_000, 512, F32, (1, 16, 64, 256)),
    (126_464, 1024, F32, (1, 16, 32, 128)),
    (126_464, 1024, BF16, (1, 32, 128)),
    (126_464, 4096, BF16, (1, 32)),
]
MORE_HEADS = [
    (126_464, 4096, F32, (1, 32, 128)),
    (152_064, 3584, F32, (1, 32)),
    (152_064, 3584, BF16, (1, 32, 128)),
]
# tokens, in, out
LINEARS = [
    (32, 128, 384),
    (32, 512, 1536),
    (256, 512, 3072),
    (32, 1024, 4096),
    (288, 1024, 4096),
    (32, 4096, 4096),
]
HEAD_RUNS = ("kernel", "torch", "onednn")
CHECKED_WEIGHTS = 1 << 17  # rows times width that the float64 product is given
MIN_REPEATS, MAX_REPEATS, ENOUGH_S = 3, 25, 1.5

FMA_PEAK = """
#include <stdio.h>
#include <time.h>
#ifdef __AVX512F__
enum { BYTES = 64 };
#elif defined(__AVX__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
typedef float vf __attribute__((vector_size(BYTES)));
enum { SUMS = 12, ROUNDS = 20000000 };
int main(void) {
    vf sum[SUMS], x = (vf){} + 0.999f, y = (vf){} + 1e-3f;
    float total = 0;
    for (int i = 0; i < SUMS; i++) sum[i] = (vf){} + (float)i;
    clock_t start = clock();
    for (int round = 0; round < ROUNDS; round++)
#pragma GCC unroll 12
        for (int i = 0; i < SUMS; i++) sum[i] = sum[i] * x + y;
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    for (int i = 0; i < SUMS; i++) total += sum[i][0];
    printf("%g\\n", total > 0 ? 2.0 * SUMS * ROUNDS * (BYTES / 4) / seconds : 0);
}
"""


def fma_peak() -> float | None:
    """Operations per second of independent multiply-adds; None where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "peak.c"), Path(folder, "peak")
        source.write_text(FMA_PEAK)
        try:
            compile_ = ["cc", "-O2", "-march=native", "-ffp-contract=fast", str(source), "-o", str(program)]
            subprocess.run(compile_, check=True, capture_output=True)
            return max(
                float(subprocess.run([program], check=True, capture_output=True).stdout) for _ in range(5)
            )
        except (OSError, subprocess.CalledProcessError):
            return None


def interleaved(runs: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Seconds of CPU time of each run."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    total_s = 0.0
    for repeat in range(MAX_REPEATS):
        if repeat >= MIN_REPEATS and total_s > ENOUGH_S:
            break
        for name, run in runs.items():
            start = time.thread_time()
            run()
            samples[name].append(time.thread_time() - start)
            total_s += samples[name][-1]
    return {name: report.spread(times) for name, times in samples.items()}


def copy_bandwidth() -> float:
    """Bytes read and written per second."""
    source, target = torch.ones(1 << 25), torch.empty(1 << 25)
    return 2 * source.nbytes / interleaved({"copy": lambda: target.copy_(source)})["copy"]["median"]


def float64_tokens(hidden: Tensor, weight: Tensor) -> Tensor:
    tops = [(hidden.double() @ weight[v : v + 8192].double().T).max(-1) for v in range(0, len(weight), 8192)]
    values, tokens = torch.stack([top.values for top in tops]), torch.stack([top.indices for top in tops])
    tile = values.argmax(0)
    return tokens.gather(0, tile[None])[0] + tile * 8192


def softmax_max(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=F32).max(-1).indices


def softmax_sample(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).softmax(-1).multinomial(1)


def measure_head(
    weight: Tensor, packed: Linear | None, num_rows: int, bytes_s: float, peak: float | None
) -> dict:
    vocab, dim = weight.shape
    hidden = torch.randn(num_rows, dim)
    narrow = hidden.to(weight.dtype)
    runs: dict[str, Callable[[], Tensor]] = {
        "kernel": lambda: kernels.head_rows(hidden, weight).token,
        "torch": lambda: softmax_max(narrow @ weight.T),
    }
    if packed is not None:
        runs["onednn"] = lambda: softmax_max(packed(hidden))
    times = interleaved(runs)
    seconds = times["kernel"]["median"]
    operations = 2 * num_rows * vocab * dim
    bound_s = max(weight.nbytes / bytes_s, operations / peak if peak else 0.0)
    checked = min(num_rows, max(1, CHECKED_WEIGHTS // dim))
    wanted = float64_tokens(hidden[:checked], weight)
    return {
        "vocab": vocab,
        "dim": dim,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "rows": num_rows,
        "seconds": times,
        "speedup_over": {name: t["median"] / seconds for name, t in times.items() if name != "kernel"},
        "gflops": operations / seconds / 1e9,
        "share_of_bound": bound_s / seconds,
        "rows_checked": checked,
        "wrong_tokens": {name: int((run()[:checked] != wanted).sum()) for name, run in runs.items()},
    }


def measure_heads(full: bool, bytes_s: float, peak: float | None) -> list[dict]:
    row("LM head, ms", *HEAD_RUNS, "speedup", "of bound", "wrong")
    results = []
    for vocab, dim, dtype, rows in HEADS + (MORE_HEADS if full else []):
        weight = torch.empty(vocab, dim, dtype=dtype)
        for tile in weight.split(8192):
            tile.copy_(torch.randn(tile.shape) * 0.05)
        packed = Linear(weight) if dtype == F32 else None
        for num_rows in rows:
            r = measure_head(weight, packed, num_rows, bytes_s, peak)
            results.append(r)
            row(
                f"{vocab} x {dim} {r['dtype']} M {num_rows}",
                *(f"{r['seconds'][n]['median'] * 1e3:.2f}" if n in r["seconds"] else "" for n in HEAD_RUNS),
                ", ".join(f"{x:.2f}" for x in r["speedup_over"].values()),
                f"{r['share_of_bound']:.0%}",
                "/".join(map(str, r["wrong_tokens"].values())) + f" of {r['rows_checked']}",
            )
    return results


def measure_passes() -> dict:
    """What reads no weights: rows of given logits, and sampling (torch: softmax and multinomial)."""
    row("\npass over logits, us", "kernel", "torch")
    results = {}
    for num_rows, vocab in ((16, 1088), (32, 126_464)):
        logits, rows = torch.randn(num_rows, vocab) * 3, torch.arange(num_rows)
        warm = torch.full((num_rows,), 0.7)
        results |= timed_pass(
            f"logit_rows {num_rows} x {vocab}",
            partial(kernels.logit_rows, logits),
            partial(softmax_max, logits),
        )
        results |= timed_pass(
            f"sample_rows {num_rows} x {vocab}",
            partial(kernels.sample_rows, logits, warm, rows, rows, rows),
            partial(softmax_sample, logits, 0.7),
        )
    for num_requests in (1, 32):
        confidence, offsets = torch.rand(32 * num_requests), torch.arange(0, 32 * num_requests + 1, 32)
        rule, value = (
            torch.full((num_requests,), kernels.THRESHOLD),
            torch.full((num_requests,), 0.9).double(),
        )
        select = partial(kernels.select, confidence, offsets, rule, value)
        results |= timed_pass(f"select {num_requests} x 32", select)
    return results


def timed_pass(name: str, kernel: Callable, plain: Callable | None = None) -> dict:
    times = interleaved({"kernel": kernel} | ({"torch": plain} if plain else {}))
    row(name, *(f"{t['median'] * 1e6:.1f}" for t in times.values()))
    return {name: times}


def measure_linears() -> list[dict]:
    """worker/linear.py: what it takes here, oneDNN's packed layout, and the plain product."""
    row("\nlinear T x K x N, us", "taken", "onednn", "plain", "speedup")
    results = []
    for num_tokens, width, out in LINEARS:
        weight, x = torch.randn(out, width), torch.randn(num_tokens, width)
        onednn = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        times = interleaved(
            {
                "taken": partial(Linear(weight), x),
                "onednn": partial(torch.ops.mkldnn._linear_pointwise, x, onednn, None, "none", [], ""),
                "plain": partial(F.linear, x, weight),
            }
        )
        seconds = {name: t["median"] for name, t in times.items()}
        speedup = {name: s / seconds["taken"] for name, s in seconds.items() if name != "taken"}
        row(
            f"{num_tokens} x {width} x {out}",
            *(f"{s * 1e6:.1f}" for s in seconds.values()),
            ", ".join(f"{x:.2f}" for x in speedup.values()),
        )
        results.append(
            {"tokens": num_tokens, "in": width, "out": out, "seconds": times, "speedup_over": speedup}
        )
    return results


def row(name: str, *cells: str) -> None:
    print(f"{name:30}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="also float32 at the widths of the 7B and 8B models"
    )
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    bytes_s, peak = copy_bandwidth(), fma_peak()
    shown = f"{peak / 1e9:.0f} Gflop/s" if peak else "not measured (no C compiler)"
    print(f"{kernels.backend_name()}, 1 thread; copy {bytes_s / 1e9:.1f} GB/s; FMA peak {shown}\n")
    results = {
        "backend": kernels.backend_name(),
        "copy_bytes_per_s": bytes_s,
        "fma_peak_flops": peak,
        "heads": measure_heads(args.full, bytes_s, peak),
        "passes": measure_passes(),
        "linears": measure_linears(),
    }
    if args.json:
        report.write(args.json, args.seed, results)


if __name__ == "__main__":
    main()
