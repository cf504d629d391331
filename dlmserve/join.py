"""`dlmserve join`: this node's devices join a head. The process is the node's agent. Knows no models."""

import argparse
import shutil
import signal
import socket
import sys
import tempfile
from types import FrameType

from dlmserve import keys
from dlmserve.control.node import find_device
from dlmserve.errors import ConfigError
from dlmserve.flags import Parser
from dlmserve.transport import check_endpoint
from dlmserve.worker.agent import Agent, Left, check_name


def join_parser() -> Parser:
    parser = Parser(
        prog="dlmserve join",
        description="Adds this node's devices to a head that was started with --listen. Ends on SIGTERM.",
    )
    parser.add_argument("head", metavar="tcp://HEAD:PORT", help="what the head listens on")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="GPUs, or ranks on the CPU")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--keys", metavar="FILE", help="node.key, made by `dlmserve keygen`")
    parser.add_argument(
        "--name", default=socket.gethostname(), help="of this node, unlike all others (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="FOLDER", help="this node's copy (default: what the head names)")
    parser.add_argument(
        "--orphan-s",
        type=float,
        default=300.0,
        metavar="S",
        help="how long the ranks outlive a head that is gone (default: %(default)g)",
    )
    return parser


def run_join(args: argparse.Namespace) -> int:
    """Returns when told to leave. Raises ConfigError, and WorkerError where the head refuses or is gone."""
    check_name(args.name)
    if args.devices < 1:
        raise ConfigError(f"--devices is {args.devices}; wanted at least 1")
    if args.keys:
        keys.read(args.keys, "node")
    check_endpoint(args.head, has_keys=bool(args.keys))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    run_dir = tempfile.mkdtemp(prefix="dlmserve-")
    try:
        agent = Agent(
            args.head,
            args.name,
            args.devices,
            find_device(args.device),
            run_dir,
            keys_file=args.keys,
            model=args.model,
            head_silence_s=args.orphan_s,
        )
        print(f"node {args.name}: {args.devices} devices join {args.head}", file=sys.stderr, flush=True)
        agent.run()
    except Left:
        pass
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    raise Left
