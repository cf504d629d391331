"""`dlmserve profile`: how long steps take on this machine, measured on the real engine, kept for `serve`.

Owns the command's flags and its output. What is measured is worker/profiler.py's, where it is kept profiles.py's.
"""

import argparse
import json
import os
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dlmserve import profiles
from dlmserve.checkpoint import ModelInfo, read_model_info, resolve
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.errors import ConfigError
from dlmserve.flags import Parser, read_integers
from dlmserve.messages import Form, ModelSpec
from dlmserve.profiles import Points

CONTEXTS = (160, 512, 2048)  # tokens of a canvas, as far as the model's context goes
PAGE_SIZE = 32
COLLECTIVE_TIMEOUT_S = 600.0


def profile_parser() -> Parser:
    parser = Parser(
        prog="dlmserve profile",
        description="Measures how long steps take here, for each TP degree, and keeps it for `dlmserve serve`.",
    )
    parser.add_argument("--model", default="tiny", metavar="NAME", help="alias, Hugging Face id or folder")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: no weights")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--dtype", default="auto", metavar="NAME", help="as for serve (default: auto)")
    parser.add_argument(
        "--tp-degrees", type=read_integers, default=(1,), metavar="1,2", help="to measure (default: 1)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of each rank on a CPU; a server with N devices gives each cores / N (default: for the largest degree)",
    )
    parser.add_argument(
        "--context", type=read_integers, metavar="N,N", help="canvas lengths (default: up to 2048)"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=32, metavar="N", help="largest batch (default: 32)"
    )
    parser.add_argument("--json", metavar="FILE", help="all degrees in one file, for `simulate --profile`")
    return parser


def run_profile(args: argparse.Namespace) -> int:
    """Raises ConfigError, CheckpointError, WorkerError."""
    info = read_model_info(resolve(args.model), args.model)
    _check(args, info)
    num_threads = args.threads or max(1, len(os.sched_getaffinity(0)) // max(args.tp_degrees))
    # Read by torch when it is imported, here and in the other ranks; as the agent sets them.
    os.environ |= {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    files = []
    for degree in args.tp_degrees:
        path, points = measure_degree(args, info, degree)
        Console().print(_table(degree, points))
        Console().print(f"kept in {path}", soft_wrap=True)
        files.append(profiles.read_profile(str(path)))
    if args.json:
        Path(args.json).write_text(json.dumps(profiles.merge(files), indent=1) + "\n", encoding="utf-8")
    return 0


def _check(args: argparse.Namespace, info: ModelInfo) -> None:
    for degree in args.tp_degrees:
        if degree not in (1, 2, 4, 8) or info.num_heads % degree:
            raise ConfigError(
                f"--tp-degrees has {degree}; wanted 1, 2, 4 or 8, dividing the model's {info.num_heads} heads"
            )
    for length in args.context or ():
        if not 2 <= length <= info.max_model_len:
            raise ConfigError(f"--context has {length}; wanted 2 to {info.max_model_len} tokens")
    if args.max_num_seqs < 1 or (args.threads is not None and args.threads < 1):
        raise ConfigError("--max-num-seqs and --threads are wanted to be at least 1")


def measure_degree(args: argparse.Namespace, info: ModelInfo, degree: int) -> tuple[Path, Points]:
    """Where the profile of this TP degree is kept, and its points. Loads the model anew."""
    from dlmserve.worker import profiler
    from dlmserve.worker.local import LocalInstance, pick_device

    lengths = args.context or [min(n, info.max_model_len) for n in CONTEXTS if n <= info.max_model_len]
    lengths = lengths or [info.max_model_len]
    decoding = profiler.made_up(info, min(lengths))
    grid = profiler.full_grid(lengths, args.max_num_seqs, decoding.block_length)
    form = _form(args, info, degree, max(lengths))
    device = pick_device(args.device)
    instance = LocalInstance(form, device)
    points: Points = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(f"TP degree {degree}", total=len(grid))
            for points in profiler.measure(instance, grid, info.mask_id, decoding):  # noqa: B007
                progress.advance(task)
    finally:
        instance.close()
    return profiles.save(profiler.key_of(form, device), points, "full"), points


def _form(args: argparse.Namespace, info: ModelInfo, degree: int, max_len: int) -> Form:
    spec = ModelSpec(info.path, args.load_format, args.dtype, info.mask_id, list(info.eos_ids))
    return Form(
        instance="profile",
        tp_rank=0,
        tp_degree=degree,
        plan_endpoints=[],
        key="",
        model=spec,
        max_model_len=max_len,
        max_num_seqs=args.max_num_seqs,
        num_pages=args.max_num_seqs * -(-max_len // PAGE_SIZE),
        page_size=PAGE_SIZE,
        collective_timeout_s=COLLECTIVE_TIMEOUT_S,
    )


def _table(degree: int, points: Points) -> Table:
    """Measured, and what the cost model makes of it."""
    table = Table("tokens", "requests", "measured ms", "cost model ms", box=SIMPLE_HEAD)
    table.title = f"TP degree {degree}"
    costs = CostModel.from_profile({"source": "", "step_s": {degree: points}})
    for num_tokens, num_requests, seconds in points:
        believed_s = costs.step_s(degree, num_tokens, num_requests)
        table.add_row(str(num_tokens), str(num_requests), f"{1e3 * seconds:.2f}", f"{1e3 * believed_s:.2f}")
    return table
