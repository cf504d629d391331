"""`dlmserve bench`: a load test of a running server; a table on stdout, JSON in a file.

Owns the command's flags, the prompts that it makes up, and its table. What is sent and timed is loadtest.py's.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dlmserve.errors import ConfigError
from dlmserve.flags import Parser, read_numbers
from dlmserve.loadtest import Run, Shot, fire, poisson_times
from dlmserve.simulation.results import report

MAX_REQUESTS = 100_000


def bench_parser() -> Parser:
    parser = Parser(
        prog="dlmserve bench",
        description="Sends requests to a running server, each at its own time (open loop), and reports what came.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="where the server wants one")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, as `simulate --json` does")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--rps",
        type=read_numbers,
        default=(4.0,),
        metavar="X",
        help="requests a second, Poisson; some with commas: one run each (default: 4)",
    )
    load.add_argument("--requests", type=int, default=100, metavar="N", help="of each run (default: 100)")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and made-up prompts")
    load.add_argument(
        "--trace", metavar="FILE", help='JSON lines {"at_s", "prompt", "max_tokens", "slo_ms"} instead'
    )
    load.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: made-up ones)")
    load.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default: the server's)")
    load.add_argument("--slo-ms", type=float, metavar="MS", help="latency SLO of each request")
    load.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S", help="of a request (default: 120)"
    )
    return parser


def run_bench(args: argparse.Namespace) -> int:
    """0 where every request was answered, else 1. Raises ConfigError."""
    _check(args)
    plans = [(None, read_trace(args.trace))] if args.trace else [(rps, _shots(args, rps)) for rps in args.rps]
    results = []
    for rps, shots in plans:
        run = asyncio.run(fire(args.url, shots, args.api_key, args.timeout_s))
        results.append(describe(run, args.seed, rps or len(shots) / max(shots[-1].at_s, 1e-9)))
        for text, count in run.errors.items():
            Console(stderr=True).print(f"{count} requests failed: {text}", style="red", markup=False)
    Console().print(table(results))
    if args.json:
        content = results if len(results) > 1 else results[0]
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if not any(result["dropped"] for result in results) else 1


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.requests <= MAX_REQUESTS:
        raise ConfigError(f"--requests is {args.requests}; wanted 1 to {MAX_REQUESTS}")
    if any(rps <= 0 for rps in args.rps):
        raise ConfigError(f"--rps is {args.rps}; wanted rates above 0")
    if not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {args.url!r}; wanted http://HOST:PORT")


def _shots(args: argparse.Namespace, rps: float) -> list[Shot]:
    slo_s = None if args.slo_ms is None else args.slo_ms / 1e3
    prompts = _read_prompts(args.prompts) if args.prompts else made_up(args.requests, args.seed)
    times = poisson_times(args.requests, rps, args.seed)
    return [Shot(at_s, prompts[i % len(prompts)], slo_s, args.max_tokens) for i, at_s in enumerate(times)]


def made_up(num_prompts: int, seed: int) -> list[str]:
    """Questions that any model can go on with."""
    rng = random.Random(seed)
    return [
        f"Start at {rng.randint(1, 40)} and count by {rng.choice([1, 2, 5, 10])}. Give {rng.randint(3, 7)} numbers."
        for _ in range(num_prompts)
    ]


def _read_prompts(path: str) -> list[str]:
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts {path} is empty; wanted one prompt a line")
    return lines


def read_trace(path: str) -> list[Shot]:
    """In the order of their times. Raises ConfigError naming the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--trace {path} cannot be read: {error}") from error
    shots = []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            slo_ms = entry.get("slo_ms")
            slo_s = None if slo_ms is None else float(slo_ms) / 1e3
            shots.append(Shot(float(entry["at_s"]), str(entry["prompt"]), slo_s, entry.get("max_tokens")))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'--trace {path}, line {number} is {line[:60]!r} ({error!r}); wanted {{"at_s": seconds, '
                '"prompt": text}} and at most "max_tokens" and "slo_ms" beside them'
            ) from error
    if not shots:
        raise ConfigError(f"--trace {path} is empty; wanted one request a line")
    return sorted(shots, key=lambda shot: shot.at_s)


def describe(run: Run, seed: int, rps: float, right: list[float] | None = None) -> dict[str, Any]:
    """One run as the JSON schema has it; `right`: what each answer is worth, where somebody knows."""
    slos = sorted({shot.slo_s for shot in run.shots if shot.slo_s is not None})
    health_ms = np.percentile(run.health_s, (50, 99)) * 1e3 if run.health_s else (None, None)
    options = {
        "layout": run.cluster.get("layout"),
        "slo_s": slos[0] if len(slos) == 1 else slos or None,
        "health_ms": {"p50": health_ms[0], "p99": health_ms[1]},
        "errors": run.errors,
    }
    overhead_ms = None if run.idle_s is None else 1e3 * run.idle_s
    return report(run.ledger(right), "bench", str(run.cluster.get("policy")), seed, rps, overhead_ms, options)


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"policy {results[0]['policy']}")
    for name in ("rps", "requests", "failed", "SLO met", "threshold", "p50 s", "p95 s", "p99 s", "tokens/s"):
        shown.add_column(name, justify="right")
    for result in results:
        latency = result["latency_s"]
        figures = (
            result["attainment"],
            result["mean_threshold"],
            latency["p50"],
            latency["p95"],
            latency["p99"],
        )
        shown.add_row(
            f"{result['rps']:g}",
            str(result["requests"]),
            str(result["dropped"]),
            *("-" if figure is None else f"{figure:.3f}" for figure in figures),
            f"{result['tokens_per_s']:.0f}",
        )
    return shown
