"""The confidence kernels on LLaDA-8B's head against the reference and against the bytes that they must move.

A kernel's bound is its bytes at the bandwidth of a device-to-device copy, measured in the same run (bytes read and
written count). Also the bf16 matrix rate, to judge steps by.
"""

from functools import partial
from statistics import median

import torch
from torch import Tensor

from bench.gpu.setup import Setting, seconds
from dlmserve import kernels
from dlmserve.kernels import reference
from dlmserve.kernels.reference import Rows


def measure(setting: Setting) -> dict:
    generator = torch.Generator(setting.device).manual_seed(0)
    vocab, d = setting.config["vocab_size"], setting.config["d_model"]
    bandwidth, matmul = copy_bandwidth(setting), matmul_tflops(setting)
    rows = []
    weight = torch.empty(vocab, d, dtype=setting.dtype, device=setting.device)
    weight.normal_(0.0, d**-0.5, generator=generator)
    for num_rows in (32, 256) if setting.small else (32, 256, 1024):
        hidden = torch.empty(num_rows, d, dtype=setting.dtype, device=setting.device)
        hidden.normal_(generator=generator)
        logits = hidden.float() @ weight.float().T
        keys = _noise_keys(num_rows, setting.device)
        runs = {
            "logit_rows": (partial(kernels.logit_rows, logits, 0, (5,)), logits.nbytes),
            "sample_rows": (partial(kernels.sample_rows, logits, *keys, 0, (5,)), logits.nbytes),
            "head_rows": (partial(kernels.head_rows, hidden, weight, 0, (5,)), weight.nbytes + hidden.nbytes),
            "torch softmax": (partial(_softmax, logits), logits.nbytes),
        }
        for name, (run, num_bytes) in runs.items():
            took_s = median(seconds(setting, run, setting.size(20, 2)))
            bound_s = num_bytes / bandwidth
            rows.append(
                {"kernel": name, "rows": num_rows, "us": 1e6 * took_s, "bound_us": 1e6 * bound_s,
                 "of_bound": bound_s / took_s, "wrong": _wrong(name, run, logits, keys)}
            )  # fmt: skip
    return {
        "backend": kernels.backend_name(setting.device),
        "copy_bytes_per_s": bandwidth,
        "matmul_tflops": matmul,
        "rows": rows,
    }


def copy_bandwidth(setting: Setting) -> float:
    """Bytes per second, read and written, of a copy far larger than the caches."""
    source = torch.empty(setting.size(1 << 31, 1 << 20), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(seconds(setting, partial(target.copy_, source), setting.size(20, 2)))


def matmul_tflops(setting: Setting) -> float:
    n = setting.size(8192, 64)
    a, b = (torch.randn(n, n, dtype=setting.dtype, device=setting.device) for _ in range(2))
    return 2e-12 * n**3 / median(seconds(setting, lambda: a @ b, setting.size(10, 2)))


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, tokens = logits.softmax(-1).max(-1)
    return values, tokens


def _noise_keys(num_rows: int, device: str) -> tuple[Tensor, ...]:
    numbers = torch.arange(num_rows, device=device)
    return torch.full((num_rows,), 0.7, device=device), numbers * 7, numbers, numbers % 5


def _wrong(name: str, run: partial, logits: Tensor, keys: tuple[Tensor, ...]) -> int | None:
    """Rows whose token is not the reference's, or whose log-sum is off by more than 1e-3; None: not compared."""
    if name == "torch softmax":
        return None
    got: Rows = run()[1] if name == "sample_rows" else run()
    wanted = (
        reference.sample_rows(logits, *keys, 0, (5,))[1]  # pyright: ignore[reportCallIssue, reportArgumentType]
        if name == "sample_rows"
        else reference.logit_rows(logits, 0, (5,))
    )
    return int(((got.token != wanted.token) | ((got.lse - wanted.lse).abs() > 1e-3)).sum())


def lines(result: dict) -> list[str]:
    out = [
        f"{result['backend']}; copy {result['copy_bytes_per_s'] / 1e9:.0f} GB/s, matrix product "
        f"{result['matmul_tflops']:.0f} TFLOP/s",
        f"{'kernel':15}{'rows':>6}{'us':>10}{'bound us':>10}{'of bound':>10}{'wrong':>7}",
    ]
    for row in result["rows"]:
        wrong = "" if row["wrong"] is None else f"{row['wrong']:7d}"
        out.append(
            f"{row['kernel']:15}{row['rows']:6d}{row['us']:10.1f}{row['bound_us']:10.1f}{row['of_bound']:10.1%}{wrong}"
        )
    return out
