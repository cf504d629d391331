"""`dlmserve plan`: which layout for which load, what it costs and why; a table on stdout, or JSON.

Owns the flags of the command and the shape of its output. The planner is control/planning's.
"""

import argparse
import json
import re
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dlmserve.control.planning.block_form import TIME_LIMIT_S, assess, solve
from dlmserve.control.policy.cost_model import PRESETS, CostModel
from dlmserve.control.policy.plan import Outcome, Plan, Problem, RequestClass, tp_layout
from dlmserve.control.policy.predictions import HistoricalAverage
from dlmserve.control.policy.workload import WorkloadMonitor
from dlmserve.errors import ConfigError
from dlmserve.flags import Parser
from dlmserve.simulation.scenarios import KV_TOKENS_PER_GPU, OVERHEAD_S
from dlmserve.simulation.workloads import sharegpt_lengths

SHAREGPT_SAMPLES = 4000


def plan_parser() -> Parser:
    parser = Parser(
        prog="dlmserve plan",
        description="Which instances serve a load of LLaDA-8B best on a cluster: the highest threshold first, "
        "then the lowest latency, then the fewest instances.",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--rps", type=float, required=True, metavar="X", help="requests a second")
    load.add_argument(
        "--lengths",
        default="1075+256",
        metavar="P+O[:SHARE],...",
        help="prompt and output tokens, and their share of the requests; or: sharegpt (default: 1075+256)",
    )
    load.add_argument(
        "--slo-ms", type=float, metavar="MS", help="latency SLO of each request (default: none)"
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, default=1, metavar="N", help="how many (default: 1)")
    cluster.add_argument("--gpus", type=int, default=8, metavar="N", help="of each node (default: 8)")
    cluster.add_argument(
        "--model-preset",
        default="h100-measured",
        metavar="NAME",
        help=f"cost model: {' or '.join(PRESETS)} (default: h100-measured)",
    )
    cluster.add_argument(
        "--overhead-ms",
        type=float,
        default=OVERHEAD_S * 1e3,
        metavar="X",
        help=f"of each step beyond the cost model (default: {OVERHEAD_S * 1e3:g}, the simulator's)",
    )
    cluster.add_argument(
        "--kv-tokens",
        type=int,
        default=KV_TOKENS_PER_GPU,
        metavar="N",
        help=f"tokens whose K/V a GPU holds (default: {KV_TOKENS_PER_GPU}, an H100 of 80 GB)",
    )
    server = parser.add_argument_group("server")
    server.add_argument(
        "--tp-degrees", default="1,2,4", metavar="1,2,4", help="TP degrees that it may use (default: 1,2,4)"
    )
    server.add_argument("--thresholds", default="0.9,0.8,0.7,0.6,0.5", metavar="X,...", help="as for serve")
    server.add_argument(
        "--max-num-seqs",
        type=int,
        default=32,
        metavar="N",
        help="requests at once, per instance (default: 32)",
    )
    server.add_argument("--present", metavar="1,1,2", help="the layout there is: would the server change it?")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="the figures as JSON, instead of the table"
    )
    return parser


def run_plan(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    problem = make_problem(args)
    started_at = time.perf_counter()
    plan = replace(solve(problem), solve_s=time.perf_counter() - started_at)
    if args.json:
        _write(args.json, json.dumps(as_json(problem, plan), indent=1))
    else:
        _print(Console(), problem, plan, args.rps)
    return 0


def _write(file: str, text: str) -> None:
    if file == "-":
        print(text)
        return
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {error}") from error


# ---- the question


def make_problem(args: argparse.Namespace) -> Problem:
    """Raises ConfigError naming the flag, its value and what is wanted."""
    for name in ("rps", "slo_ms", "nodes", "gpus", "kv_tokens", "max_num_seqs"):
        _positive(name, getattr(args, name))
    if args.overhead_ms < 0:
        raise ConfigError(f"--overhead-ms is {args.overhead_ms:g}; wanted 0 or more")
    costs = CostModel.from_preset(args.model_preset)
    degrees = _degrees("--tp-degrees", args.tp_degrees, args.gpus)
    thresholds = sorted(_numbers("--thresholds", args.thresholds), reverse=True)
    if not all(0 < each <= 1 for each in thresholds):
        raise ConfigError(f"--thresholds is {args.thresholds}; wanted values above 0 and at most 1")
    overhead_s = args.overhead_ms / 1e3
    present = _layout(args.present, args.nodes * args.gpus) if args.present else []
    return Problem(
        classes=_classes(args.lengths, args.rps, None if args.slo_ms is None else args.slo_ms / 1e3),
        nodes=[args.gpus] * args.nodes,
        tp_degrees=degrees,
        thresholds=thresholds,
        tokens_per_step=HistoricalAverage().tokens_per_step(np.array(thresholds)).tolist(),
        step_s={d: [(n, s + overhead_s) for n, s in costs.points(d)] for d in {*degrees, *present}},
        max_num_seqs=args.max_num_seqs,
        kv_tokens=args.kv_tokens,
        present=present,
    )


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < inf:
        raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; wanted more than 0")


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} is '{text}'; wanted numbers with commas between them") from error


def _degrees(flag: str, text: str, num_gpus: int) -> list[int]:
    degrees = _numbers(flag, text)
    for degree in degrees:
        if degree not in (1, 2, 4, 8):
            raise ConfigError(f"{flag} has {degree:g}; wanted 1, 2, 4 or 8")
    fitting = sorted({int(degree) for degree in degrees if degree <= num_gpus})
    if not fitting:
        raise ConfigError(f"{flag} is {text}, but a node has {num_gpus} GPUs; wanted a degree that fits")
    return fitting


def _layout(text: str, num_gpus: int) -> list[int]:
    layout = [int(each) for each in _numbers("--present", text)]
    if any(each not in (1, 2, 4, 8) for each in layout) or sum(layout) > num_gpus:
        raise ConfigError(f"--present is {text}; wanted TP degrees (1, 2, 4, 8) of {num_gpus} GPUs in all")
    return layout


def _classes(text: str, rps: float, slo_s: float | None) -> list[RequestClass]:
    if text == "sharegpt":
        monitor = WorkloadMonitor(window_s=1.0)
        lengths = sharegpt_lengths(SHAREGPT_SAMPLES, np.random.default_rng(0))
        for prompt, output in zip(*(each.tolist() for each in lengths), strict=True):
            monitor.arrived(0.0, prompt, output, slo_s)
        classes = monitor.classes(0.0)
    else:
        classes = [_class(part, slo_s) for part in text.split(",")]
    scale = rps / sum(each.rps for each in classes)
    return [replace(each, rps=scale * each.rps) for each in classes]


def _class(text: str, slo_s: float | None) -> RequestClass:
    match = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)(?::(\d*\.?\d+))?", text.strip())
    if not match or float(match[3] or 1) == 0:
        raise ConfigError(
            f"--lengths has '{text}'; wanted PROMPT+OUTPUT in tokens and perhaps :SHARE, e.g. 1075+256:0.7,"
            "200+512:0.3; or sharegpt"
        )
    return RequestClass(float(match[1]), float(match[2]), float(match[3] or 1), slo_s)


# ---- the answer


def utilisation(problem: Problem, plan: Plan) -> float | None:
    """Share of all GPUs' time that the load keeps busy."""
    busy = plan.outcome and sum(degree * num for degree, num in plan.outcome.busy.items())
    return None if busy is None else busy / problem.num_gpus


def as_json(problem: Problem, plan: Plan) -> dict:
    outcome = plan.outcome
    return {
        "layout": {str(degree): num for degree, num in plan.layout.items()},
        "needed": {str(degree): num for degree, num in plan.needed.items()},
        "mean_threshold": outcome and outcome.mean_threshold,
        "latency_s": outcome and outcome.latency_s,
        "utilisation": utilisation(problem, plan),
        "status": plan.status,
        "reason": plan.reason or None,
        "solve_s": plan.solve_s,
    }


@dataclass
class _Row:
    name: str
    counts: dict[int, int]
    outcome: Outcome | None


def _print(console: Console, problem: Problem, plan: Plan, rps: float) -> None:
    rows = [_Row("plan", plan.layout, plan.outcome)]
    if problem.present:
        rows.append(_Row("present", _counts(problem.present), plan.present))
    for degree in problem.tp_degrees:
        counts = {degree: sum(num // degree for num in problem.nodes)}
        rows.append(_Row(f"all TP-{degree}", counts, assess(problem, counts, TIME_LIMIT_S)))
    table = Table("", "layout", "GPUs busy", "threshold", "latency s", "at once", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.name, _words(row.counts), *_figures(problem, row.outcome))
    console.print(
        f"{rps:g} requests a second on {len(problem.nodes)} x {problem.nodes[0]} GPUs", style="bold"
    )
    console.print(table)
    for line in _reasons(problem, plan):
        console.print(line)


def _counts(layout: list[int]) -> dict[int, int]:
    return {degree: layout.count(degree) for degree in sorted(set(layout))}


def _words(counts: dict[int, int]) -> str:
    return " + ".join(f"{num} x TP-{degree}" for degree, num in sorted(counts.items(), reverse=True))


def _figures(problem: Problem, outcome: Outcome | None) -> tuple[str, ...]:
    if outcome is None:
        return ("can't carry it", "-", "-", "-")
    busy = sum(degree * num for degree, num in outcome.busy.items())
    return (
        f"{busy:.1f} of {problem.num_gpus}",
        f"{outcome.mean_threshold:.3f}",
        f"{outcome.latency_s:.2f}",
        ", ".join(f"TP-{degree}: {num}" for degree, num in sorted(outcome.concurrency.items(), reverse=True)),
    )


def _reasons(problem: Problem, plan: Plan) -> list[str]:
    """What decided, in words."""
    if plan.outcome is None:
        return [f"infeasible: {plan.reason}.", f"So the most throughput there is: {_words(plan.layout)}."]
    lines = [f"Fewest instances that serve so: {_words(plan.needed)} ({sum(tp_layout(plan.needed))} GPUs)."]
    mix = [
        f"{share:.0%} at {threshold:g}"
        for threshold, share in zip(problem.thresholds, plan.outcome.threshold_mix, strict=True)
        if share >= 0.005
    ]
    held = plan.outcome.mean_threshold >= problem.thresholds[0] - 0.002
    lines.append(
        f"Thresholds: {', '.join(mix)} of the tokens"
        + ("." if held else "; GPUs or SLO leave no room for more.")
    )
    if plan.status == "feasible":
        lines.append("The time limit came before the proof that this is the best.")
    return lines
