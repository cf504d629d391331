"""Everything about the GPU path that only a GPU can tell, in one command of at most 8 minutes.

    python -m bench.gpu_report [--json bench/results/gpu.json]
    python -m bench.gpu_report --device cpu --small      # every line of it, in seconds, without a GPU

Golden cases on the device; kernels and attention against their references and their byte bounds; groups of ranks formed
and left; LLaDA-8B's shape with
random weights: step latency beside the published table, tokens per second against a plain loop in the same run, idle
time between steps, peak memory. Needs torch, numpy, msgspec, safetensors, tokenizers and jinja2, none of the server's
other packages.
"""

import argparse
import faulthandler
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import report
from bench.gpu import attentions, decode, golden, groups, kernels, steps
from bench.gpu.setup import Setting

LIMIT_S = 480.0
# What the last batch of the last part takes at most.
RESERVE_S = 90.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu with --small")
    parser.add_argument("--small", action="store_true", help="small shapes, few repeats")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--parts", nargs="+", help="only these: golden kernels attention groups steps decode")
    args = parser.parse_args(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device is {args.device} but torch sees no GPU; use --device cpu --small")
    began_at = time.perf_counter()
    # A hang says where, and what was measured is kept.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)  # pyright: ignore[reportArgumentType]
    try:
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(args.device, args.small, folder)
            setting.write_config()
            run(setting, args.parts, began_at, lambda results: save(args.json, setting, results))
    finally:
        faulthandler.cancel_dump_traceback_later()


def save(file: str | None, setting: Setting, results: dict) -> None:
    if file is None:
        return
    whole = {
        "commit": report.commit(),
        "machine": machine(setting),
        "small": setting.small,
        "results": results,
    }
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(whole, indent=1) + "\n")


def run(
    setting: Setting,
    only: list[str] | None,
    began_at: float,
    keep: Callable[[dict], None] = lambda results: None,
) -> dict:
    """Part by part; one that fails is reported and leaves the others alone. `keep` gets what there is after each."""
    deadline_at = began_at + LIMIT_S - RESERVE_S
    parts: dict[str, tuple[Callable[[], dict], Callable[[dict], list[str]]]] = {
        "golden": (lambda: golden.measure(setting), golden.lines),
        "kernels": (lambda: kernels.measure(setting), kernels.lines),
        "attention": (lambda: attentions.measure(setting), attentions.lines),
        "groups": (lambda: groups.measure(setting), groups.lines),
        "steps": (lambda: steps.measure(setting), steps.lines),
        "decode": (lambda: decode.measure(setting, deadline_at), decode.lines),
    }
    results = {}
    print("\n".join(f"{name}: {value}" for name, value in machine(setting).items()))
    for name, (measure, lines) in parts.items():
        if only and name not in only:
            continue
        part_at = time.perf_counter()
        try:
            if part_at > deadline_at:
                raise TimeoutError(f"left out: {part_at - began_at:.0f} s of {LIMIT_S:g} were gone")
            results[name] = measure()
            text = lines(results[name])
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            text = [results[name]["error"]]
        took_s = results[name]["seconds"] = time.perf_counter() - part_at
        print(f"\n{name} ({took_s:.0f} s)", *text, sep="\n", flush=True)
        keep(results)
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()
    return results


def machine(setting: Setting) -> dict:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(setting.device)
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30)}
    else:
        found |= report.machine()
    return found


if __name__ == "__main__":
    main()
