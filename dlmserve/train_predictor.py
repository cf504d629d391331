"""`dlmserve train-predictor`: runs prompts on the real engine at every threshold, trains the model's step predictor.

Owns the flags of the command, the order of its work and its tables. How courses become features and features
predictions is for training/ and control/policy/.
"""

import argparse
import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dlmserve.config import ServerConfig
from dlmserve.control.policy.step_predictor import Errors
from dlmserve.control.predictor_files import ERRORS, NETWORK, TREES, TREES_HIDDEN, cached_folder
from dlmserve.errors import ConfigError
from dlmserve.flags import Parser, read_integers, read_numbers
from dlmserve.llm import LLM
from dlmserve.training.courses import Course, run_courses
from dlmserve.training.learn import MIN_RECOMPUTES, Learned, learn
from dlmserve.training.prompts import encode_prompts, load_prompts


def run_train_predictor(args: argparse.Namespace) -> int:
    """Raises DlmServeError."""
    console = Console(stderr=True)
    thresholds = tuple(sorted(args.thresholds, reverse=True))
    llm = LLM(args.model, device=args.device, dtype=args.dtype, tp_degree=args.tp_degree)
    try:
        courses = _run(llm, args, thresholds, console)
    finally:
        llm.close()
    console.print(f"{len(courses)} decodings, {sum(len(each.steps) for each in courses)} steps; training")
    learned = learn(courses, llm.info, args.seed)
    folder = Path(args.output) if args.output else cached_folder(llm.info.path)
    _save(learned, folder)
    _print(learned.report)
    if learned.network is None:
        console.print(
            f"no hidden-state predictor: fewer than {MIN_RECOMPUTES} recompute steps; more --requests"
        )
    console.print(f"stored in {folder}")
    return 0


def train_predictor_parser() -> Parser:
    parser = Parser(
        prog="dlmserve train-predictor",
        description="Learns how many steps requests need, from decoding prompts at every threshold.",
    )
    defaults = ServerConfig()
    parser.add_argument("--model", default="tiny", metavar="NAME", help="alias, Hugging Face id or folder")
    parser.add_argument(
        "--requests", type=int, default=100, metavar="N", help="prompts to run (default: 100)"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="JSON lines with 'prompt' or 'messages', like your traffic (default: the model's own, or a built-in list)",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="where the predictor goes (default: where serve finds it)"
    )
    parser.add_argument(
        "--gen-lengths",
        type=read_integers,
        metavar="N,N,...",
        help="output lengths, in turn (default: 1/2, 3/4 and all of the model's)",
    )
    parser.add_argument(
        "--thresholds",
        type=read_numbers,
        default=defaults.thresholds,
        metavar="X,X,...",
        help=f"default: {','.join(map(str, defaults.thresholds))}",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--tp-degree", type=int, default=1, metavar="N", help="ranks to run on (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of split and training (default: 0)")
    return parser


def _run(llm: LLM, args: argparse.Namespace, thresholds: tuple[float, ...], console: Console) -> list[Course]:
    if llm.tokenizer is None:
        raise ConfigError(f"model {args.model} has no tokenizer.json, so it cannot take prompts")
    chats, source = load_prompts(args.prompts, llm.info.path)
    if not 10 <= args.requests <= len(chats):
        raise ConfigError(
            f"--requests is {args.requests}; wanted 10 to {len(chats)}, as many as there are in {source}"
        )
    full = llm.info.default_gen_length
    lengths = args.gen_lengths or tuple(dict.fromkeys((full // 2, full * 3 // 4, full)))
    console.print(f"{args.requests} prompts from {source}, output {', '.join(map(str, lengths))} tokens")
    prompts = encode_prompts(chats[: args.requests], llm.tokenizer)
    with Progress(console=console) as progress:
        task = progress.add_task("decoding", total=len(prompts) * len(thresholds))
        return run_courses(llm, prompts, thresholds, lengths, lambda: progress.advance(task))


def _save(learned: Learned, folder: Path) -> None:
    """Files that are not made this time go, so that none is older than the others."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (TREES, TREES_HIDDEN, NETWORK):
            (folder / name).unlink(missing_ok=True)
        learned.trees.save(folder / TREES)
        if learned.network and learned.trees_hidden and learned.hidden:
            learned.trees_hidden.save(folder / TREES_HIDDEN)
            learned.network.save(folder / NETWORK, learned.hidden.arrays())
        (folder / ERRORS).write_text(json.dumps(learned.report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {folder} cannot be written: {error}") from error


def _print(report: dict) -> None:
    """Error: sum of |predicted - actual| over sum of actual remaining steps, of held-out requests."""
    table = Table(
        "features", "after a step", "on arrival", box=SIMPLE_HEAD, title="error of the remaining steps"
    )
    for name, errors in report["by_features"].items():
        table.add_row(name, *(f"{errors[field]:.1%}" for field in Errors._fields))
    console = Console()
    console.print(table)
    table = Table("predicted every", "after a step", box=SIMPLE_HEAD)
    for tokens, error in report["by_refresh"].items():
        table.add_row(f"{tokens} tokens", f"{error:.1%}")
    console.print(table)
