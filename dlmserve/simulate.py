"""`dlmserve simulate`: policies on a simulated cluster; a table on stdout, JSON in a file.

Owns the flags of the command and the shape of its output. What happens in a run is simulator.py's.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.errors import ConfigError
from dlmserve.flags import Parser, read_integers, read_numbers
from dlmserve.profiles import read_profile
from dlmserve.simulation import unmasking
from dlmserve.simulation.results import report
from dlmserve.simulation.scenarios import SCENARIOS, SWEEP_RPS, NodeFailure, Scenario, get_scenario
from dlmserve.simulator import PredictorName, Simulator

MAX_NUM_SEQS = 128
WINDOW_PERIODS = (
    4  # from plan to plan, in the window over which requests are counted: what few of them came is chance
)
NO_LIMIT = 10**9
SLOW = (
    "the simulator's C is not built, so runs take two to four times as long; with a compiler: pip install ."
)

COLUMNS = ("policy", "rps", "seed", "dropped", "SLO met", "threshold", "accuracy", "p50 s", "p99 s")


def run_simulate(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    scenario = _scenario(args)
    profile = read_profile(args.profile) if args.profile else None
    if unmasking.compiled is None:
        Console(stderr=True).print(f"[dim]{SLOW}")
    rates = args.rps or (SWEEP_RPS if args.scenario == "sweep" else (scenario.rps,))
    results = []
    for policy in args.policy.split(","):
        config = _config(args, scenario, policy)
        for rps in rates:
            for seed in args.seed:
                results.append(simulate(config, replace(scenario, rps=rps), seed, args.predictor, profile))
                Console(stderr=True).print(f"[dim]{_line(results[-1])}")
    Console().print(_table(results))
    if args.json:
        content = results if len(results) > 1 else results[0]
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def simulate(
    config: ServerConfig,
    scenario: Scenario,
    seed: int,
    predictor: PredictorName = "catboost",
    profile: dict | None = None,
) -> dict:
    """One run as the JSON schema has it. `profile`: measured step times instead of the scenario's preset."""
    make_costs = None if profile is None else partial(CostModel.from_profile, profile)
    simulator = Simulator(config, scenario, seed, predictor, time.perf_counter, make_costs=make_costs)
    with _few_collections():
        ledger = simulator.run()
    options = {
        "cost_model": scenario.cost_model if profile is None else profile["source"],
        "predictor": predictor,
        "text": scenario.text,
        "early_answers": scenario.early_answers,
        "slo_s": scenario.slo_s,
        "failures": [list(each) for each in scenario.failures],
        "layout": list(scenario.layout),
        "refresh": config.refresh,
        "reconfigure_every_s": config.reconfigure_every_s,
        "max_resident_tokens": config.max_resident_tokens,
        "policy_options": dict(config.policy_options),
    }
    overhead_ms = scenario.overhead_s * 1e3
    return report(ledger, scenario.name, config.policy, seed, scenario.rps, overhead_ms, options)


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run makes many objects and no cycles: collecting garbage as often as Python does takes 4% of its time."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def make_config(scenario: Scenario, policy: str, **settings) -> ServerConfig:
    """A server's settings on the scenario's cluster; raises ConfigError."""
    every_s = settings.get("reconfigure_every_s")
    window = {"workload_window_s": WINDOW_PERIODS * every_s} if every_s else {}
    config = ServerConfig(
        policy=policy,
        tp_layout=scenario.layout,
        page_size=scenario.page_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_queue=NO_LIMIT,
        slo_ms=scenario.slo_s * 1e3,
        **(window | settings),
    )
    config.check()
    return config


def simulate_parser() -> Parser:
    parser = Parser(
        prog="dlmserve simulate",
        description="Runs the scheduler of this server on a simulated cluster of LLaDA-8B on H100s.",
    )
    parser.add_argument(
        "--scenario",
        default="gsm8k-4gpu",
        metavar="NAME",
        help=f"{', '.join(SCENARIOS)} (default: gsm8k-4gpu)",
    )
    parser.add_argument(
        "--policy", default="dlmserve", metavar="NAME", help="one, or some with commas between"
    )
    parser.add_argument(
        "--policy-option", action="append", default=[], metavar="NAME=X", help="of the policy; repeatable"
    )
    parser.add_argument(
        "--rps", type=read_numbers, metavar="X", help="requests a second; some with commas: a sweep"
    )
    parser.add_argument(
        "--seed", type=read_integers, default=(0,), metavar="N", help="one, or some (default: 0)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument(
        "--cost-model", metavar="NAME", help="h100-measured or h100-nvlink (default: the scenario's)"
    )
    cluster.add_argument(
        "--profile", metavar="FILE", help="step times that `dlmserve profile` measured, instead of a preset"
    )
    cluster.add_argument(
        "--overhead-ms",
        type=float,
        metavar="X",
        help="of each step beyond the cost model (default: the scenario's; with --profile none)",
    )
    cluster.add_argument(
        "--tp-layout", type=read_integers, metavar="1,1,2", help="TP degree of each instance"
    )
    cluster.add_argument(
        "--reconfigure-every",
        type=float,
        metavar="S",
        help="let the planner change the layout, by the load of the last S seconds (default: never)",
    )
    cluster.add_argument(
        "--node-failure",
        type=_node_failure,
        action="append",
        default=[],
        metavar="AT:NODE:S",
        help="that node (from 0) is cut off at AT seconds, for S seconds; repeatable",
    )
    cluster.add_argument(
        "--max-resident-tokens", type=int, metavar="N", help="per instance (default: the policy's)"
    )
    cluster.add_argument("--refresh", default="full", metavar="full|response:K", help="as for serve")
    load = parser.add_argument_group("load")
    load.add_argument("--requests", type=int, metavar="N", help="how many (gsm8k-4gpu)")
    load.add_argument("--output", type=int, metavar="N", help="output tokens of each (gsm8k-4gpu)")
    load.add_argument("--slo-ms", type=float, metavar="MS", help="latency SLO (default: the scenario's)")
    load.add_argument("--text", choices=("gsm8k", "harder"), help="how fast confidence grows")
    load.add_argument("--early-answers", action="store_true", help="answers end before their output does")
    parser.add_argument(
        "--predictor",
        choices=("catboost", "average", "oracle"),
        default="catboost",
        help="of the remaining steps: trained on simulated requests (default), history, or the truth",
    )
    return parser


def _scenario(args: argparse.Namespace) -> Scenario:
    scenario = get_scenario(args.scenario)
    if args.profile and args.cost_model:
        raise ConfigError("--profile and --cost-model both say how long steps take; wanted one of them")
    if args.profile:
        scenario = replace(scenario, overhead_s=0.0)
    given = {
        "cost_model": args.cost_model,
        "overhead_s": None if args.overhead_ms is None else args.overhead_ms / 1e3,
        "layout": args.tp_layout,
        "failures": tuple(args.node_failure) or None,
        "num_requests": args.requests,
        "output": args.output,
        "slo_s": None if args.slo_ms is None else args.slo_ms / 1e3,
        "text": args.text,
        "early_answers": args.early_answers or None,
    }
    if args.tp_layout and sum(args.tp_layout) != sum(scenario.layout):
        given["nodes"] = ()  # another number of GPUs: one node
    scenario = replace(scenario, **{name: value for name, value in given.items() if value is not None})
    for failure in scenario.failures:
        if not 0 <= failure.node < max(len(scenario.nodes), 1):
            raise ConfigError(
                f"--node-failure names node {failure.node}; {scenario.name} has {max(len(scenario.nodes), 1)}, from 0"
            )
    return scenario


def _config(args: argparse.Namespace, scenario: Scenario, policy: str) -> ServerConfig:
    return make_config(
        scenario,
        policy,
        refresh=args.refresh,
        reconfigure_every_s=args.reconfigure_every,
        max_resident_tokens=args.max_resident_tokens,
        policy_options=dict(map(_option, args.policy_option)),
    )


def _option(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError as error:
        raise ConfigError(f"--policy-option is {text!r}; wanted NAME=NUMBER, e.g. moves=0") from error


def _node_failure(text: str) -> NodeFailure:
    try:
        at, node, down_s = text.split(":")
        return NodeFailure(float(at), int(node), float(down_s))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}'; wanted AT:NODE:SECONDS, e.g. 100:0:60") from error


def _line(result: dict) -> str:
    return f"{result['policy']} at {result['rps']:g} rps, seed {result['seed']}: {result['attainment']:.1%}"


def _table(results: list[dict]) -> Table:
    table = Table(
        *COLUMNS, box=SIMPLE_HEAD, title=f"{results[0]['scenario']}, {results[0]['options']['cost_model']}"
    )
    for result in results:
        latency = result["latency_s"]
        figures = (
            result["attainment"],
            result["mean_threshold"],
            result["accuracy"],
            latency["p50"],
            latency["p99"],
        )
        table.add_row(
            result["policy"],
            f"{result['rps']:g}",
            *(str(result[name]) for name in ("seed", "dropped")),
            *("-" if figure is None else f"{figure:.3f}" for figure in figures),
        )
    return table
