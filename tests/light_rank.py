"""A rank process without torch, for tests of the agent: says hello, fails with status n at `Cancel(n)`."""

import argparse
import os
import sys

from dlmserve.messages import PROTOCOL_VERSION, Cancel, RankHello
from dlmserve.transport import Dealer
from dlmserve.worker.lifeline import die_with_parent

parser = argparse.ArgumentParser()
for name in ("head", "node", "device", "run-dir"):
    parser.add_argument(f"--{name}")
for name in ("index", "generation", "parent"):
    parser.add_argument(f"--{name}", type=int)
args = parser.parse_args()
die_with_parent(args.parent)

me = (args.node, args.index, args.generation)
head = Dealer(args.head, "{}:{}:{}".format(*me))
print("a line on stdout", flush=True)
print("OMP_NUM_THREADS is", os.environ["OMP_NUM_THREADS"], file=sys.stderr, flush=True)
head.send(RankHello(PROTOCOL_VERSION, *me, os.getpid(), args.device, "ipc:///nowhere"))
while True:
    match head.receive():
        case Cancel(status):
            print("told to end with status", status, file=sys.stderr, flush=True)
            sys.exit(status)
