"""The command line: which command, its flags, its exit status. Imports nothing heavy before a command runs.

Exit status: 0 done, 1 the command failed, 2 it was called wrongly.
"""

import argparse
import sys
from collections.abc import Callable

from dlmserve import __version__
from dlmserve.errors import ConfigError, DlmServeError
from dlmserve.flags import Parser, add_flags, make_config, unknown_name

EPILOG = """commands:
  serve     serve a model over HTTP (the default)
  generate  answer one prompt in the terminal, the canvas filling in as you watch
  bench     load test of a running server
  join      this node's devices join a head
  keygen    make the keys of the links between nodes
  simulate  policies on a simulated cluster of GPUs
  plan      which layout for which load
  profile   measure how long steps take here, for serve and simulate
  train-predictor  learn how many steps a model's requests need

`dlmserve COMMAND --help` lists a command's options."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status; argv: sys.argv without the program."""
    argv = sys.argv[1:] if argv is None else argv
    name, rest = ("serve", argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    try:
        if name not in COMMANDS:
            raise ConfigError(unknown_name("command", name, COMMANDS))
        return COMMANDS[name](rest)
    except DlmServeError as error:
        print(f"dlmserve: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def serve(argv: list[str]) -> int:
    parser = Parser(
        prog="dlmserve",
        usage="dlmserve [COMMAND] [OPTIONS]",
        description="A server for diffusion language models.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dlmserve {__version__}")
    add_flags(parser)
    config = make_config(parser.parse(argv))
    from dlmserve.server.serve import run_server

    return run_server(config)


def generate(argv: list[str]) -> int:
    args = _generate_parser().parse(argv)
    from dlmserve.generate import run_generate

    return run_generate(args)


def join(argv: list[str]) -> int:
    from dlmserve.join import join_parser, run_join

    return run_join(join_parser().parse(argv))


def keygen(argv: list[str]) -> int:
    parser = Parser(
        prog="dlmserve keygen",
        description="Makes head.key (for serve --keys) and node.key (for join --keys). Keep both secret.",
    )
    parser.add_argument("folder", help="where to write them; no key there is overwritten")
    from dlmserve.keys import generate

    for path in generate(parser.parse(argv).folder):
        print(path)
    return 0


def simulate(argv: list[str]) -> int:
    from dlmserve.simulate import run_simulate, simulate_parser

    return run_simulate(simulate_parser().parse(argv))


def plan(argv: list[str]) -> int:
    from dlmserve.plan import plan_parser, run_plan

    return run_plan(plan_parser().parse(argv))


def bench(argv: list[str]) -> int:
    from dlmserve.bench import bench_parser, run_bench

    return run_bench(bench_parser().parse(argv))


def profile(argv: list[str]) -> int:
    from dlmserve.profile import profile_parser, run_profile

    return run_profile(profile_parser().parse(argv))


def train_predictor(argv: list[str]) -> int:
    from dlmserve.train_predictor import run_train_predictor, train_predictor_parser

    return run_train_predictor(train_predictor_parser().parse(argv))


def _generate_parser() -> Parser:
    parser = Parser(
        prog="dlmserve generate",
        description="Answers one prompt in this process and shows how its canvas fills in.",
    )
    parser.add_argument("prompt", help="the text; '-' reads standard input")
    parser.add_argument(
        "--raw", action="store_true", help="complete the text as it is, without the chat template"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="tiny", metavar="NAME", help="alias, Hugging Face id or folder (default: tiny)"
    )
    _choice(model, "--load-format", ("auto", "dummy"))
    _choice(model, "--device", ("auto", "cpu", "cuda"))
    _choice(model, "--dtype", ("auto", "float32", "bfloat16", "float16"))
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--gen-length", type=int, metavar="N", help="tokens to generate (default: the model's)"
    )
    decoding.add_argument(
        "--block-length", type=int, metavar="N", help="tokens decoded together (default: the model's)"
    )
    decoding.add_argument(
        "--threshold", type=float, metavar="X", help="unmask at this confidence (default: 0.9)"
    )
    decoding.add_argument(
        "--factor", type=float, metavar="X", help="Fast-dLLM's factor rule instead of a threshold"
    )
    decoding.add_argument(
        "--steps", type=int, metavar="N", help="a fixed schedule of N steps instead of a threshold"
    )
    decoding.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0: greedy (default)")
    decoding.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="draw from the likeliest share X"
    )
    decoding.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest tokens; 0: all"
    )
    decoding.add_argument("--seed", type=int, metavar="N", help="of the draws (default: random)")
    decoding.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable"
    )
    _choice(decoding, "--cache", ("dual", "prefix", "none"))
    decoding.add_argument(
        "--refresh", default="full", metavar="full|response:K", help="what a block's first step computes"
    )
    return parser


def _choice(group: argparse._ArgumentGroup, name: str, options: tuple[str, ...]) -> None:
    group.add_argument(name, choices=options, default=options[0], help=f"default: {options[0]}")


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": serve,
    "generate": generate,
    "bench": bench,
    "join": join,
    "keygen": keygen,
    "simulate": simulate,
    "plan": plan,
    "profile": profile,
    "train-predictor": train_predictor,
}
