"""The node agent: starts one rank process per device of its node, watches them, restarts those that end.

It keeps one process more that has imported everything already (spare.py): the next rank that is lost comes back as
that one, in a fraction of the time. Owns the rank processes and their output. Knows nothing of models or
instances, and never imports torch: ranks find out what to do from the head. An agent that goes, or loses its
head, takes its ranks with it.
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial

import zmq

from dlmserve import keys
from dlmserve.errors import ConfigError, WorkerError
from dlmserve.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    Heartbeat,
    Introduce,
    NodeLeft,
    RankExited,
    RestartRank,
    Shutdown,
)
from dlmserve.transport import Dealer
from dlmserve.worker.lifeline import HEARTBEAT_S, die_with_parent, leave_signals_to_head
from dlmserve.worker.rank_process import NO_DEVICE, RankProcess

HEAD_SILENCE_S = 30.0  # without a word from the head
YOUNG_S = 20.0  # a rank that ends earlier failed to start; the next one waits longer, up to
MAX_BACKOFF_S = 30.0
RANK_COMMAND = [sys.executable, "-m", "dlmserve.worker.rank"]
SPARE_COMMAND = [sys.executable, "-m", "dlmserve.worker.spare"]
SPARE_AFTER_S = 10.0  # after the last start of a rank, which it would slow down


class Left(Exception):
    """The node leaves its head of its own accord."""


class Agent:
    """`device` is "cpu" (virtual devices) or "cuda". To be run by the thread that made it."""

    def __init__(
        self,
        head: str,
        node: str,
        num_devices: int,
        device: str,
        run_dir: str,
        rank_command: list[str] = RANK_COMMAND,
        spare_command: list[str] | None = SPARE_COMMAND,
        keys_file: str | None = None,
        model: str | None = None,
        head_silence_s: float | None = None,
    ) -> None:
        """`spare_command` None: no spare process is kept."""
        self._head, self._node, self._num_devices = head, node, num_devices
        self._device, self._run_dir, self._rank_command = device, run_dir, rank_command
        self._spare_command, self._keys_file, self._model = spare_command, keys_file, model
        self._head_silence_s = HEAD_SILENCE_S if head_silence_s is None else head_silence_s
        self._env = rank_environment(num_devices)
        self._dealer = Dealer(head, f"{node}:agent", keys.read(keys_file, "node") if keys_file else None)
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], None]] = {}
        self._ranks: dict[int, RankProcess] = {}  # by device; none while its restart waits
        self._starts: dict[int, tuple[float, int]] = {}  # by device: when, and which generation
        self._spare: RankProcess | None = None
        self._spare_at = math.inf  # when to start the next one
        self._num_young_deaths = [0] * num_devices
        self._beat_at = self._heard_at = time.monotonic()
        self._stopping = False

    def run(self) -> None:
        """Until the head says Shutdown, or `Left` is raised by a signal handler.

        Raises WorkerError where the head falls silent or sends this node away.
        """
        self._say_hello()
        self._watch(self._dealer.socket, self._obey_head)
        self._starts = {device: (0.0, 1) for device in range(self._num_devices)}
        try:
            while not self._stopping:
                self._do_what_is_due(time.monotonic())
                for source, _ in self._poller.poll(self._wait_ms(time.monotonic())):
                    if handler := self._handlers.get(source):
                        handler()
        except Left:
            self._dealer.send(NodeLeft(self._node, "it was told to leave"))
            raise
        finally:
            self._kill_ranks()
            self._dealer.close(linger_s=1.0)

    def _say_hello(self) -> None:
        self._dealer.send(AgentHello(PROTOCOL_VERSION, self._node, self._num_devices, os.getpid()))

    def _do_what_is_due(self, now: float) -> None:
        if now - self._heard_at > self._head_silence_s:
            raise WorkerError(
                f"no word from the head at {self._head} for {self._head_silence_s:g} s; does it run, and does "
                "it know this node's key?"
            )
        if now >= self._beat_at:
            self._dealer.send(Heartbeat(self._node, -1, 0))
            self._beat_at = now + HEARTBEAT_S
        for device, (start_at, generation) in list(self._starts.items()):
            if now >= start_at:
                del self._starts[device]
                self._start(device, generation)
        if now >= self._spare_at and not self._starts:
            self._start_spare()

    def _wait_ms(self, now: float) -> int:
        due_at = min([self._beat_at, self._spare_at, *(start_at for start_at, _ in self._starts.values())])
        return math.ceil(max(0.0, due_at - now) * 1000)

    def _start(self, device: int, generation: int) -> None:
        options = {
            "head": self._head,
            "node": self._node,
            "device": self._device if self._device == "cpu" else f"{self._device}:{device}",
            "index": device,
            "generation": generation,
            "run-dir": self._run_dir,
            "parent": os.getpid(),
        }
        options |= {"keys": self._keys_file} if self._keys_file else {}
        options |= {"model": self._model} if self._model else {}
        flags = [f"--{name}={value}" for name, value in options.items()]
        if self._spare and self._spare.become(device, generation, flags):
            self._ranks[device], self._spare = self._spare, None
        else:
            rank = RankProcess(device, generation, self._rank_command + flags, self._env)
            self._ranks[device] = rank
            self._attend(rank)
        if self._spare_command:
            self._spare_at = time.monotonic() + SPARE_AFTER_S

    def _start_spare(self) -> None:
        self._spare_at = math.inf
        if self._spare is None and self._spare_command:
            self._spare = RankProcess(NO_DEVICE, 0, [*self._spare_command, str(os.getpid())], self._env)
            self._attend(self._spare)

    def _attend(self, rank: RankProcess) -> None:
        self._watch(rank.output, partial(self._forward_output, rank))
        self._watch(rank.pidfd, partial(self._reap, rank))

    def _obey_head(self) -> None:
        self._heard_at = time.monotonic()
        for message in self._dealer.drain():
            match message:
                case Shutdown(reason):
                    if reason:
                        raise WorkerError(f"the head at {self._head} sends this node away: {reason}")
                    self._stopping = True
                case Introduce():
                    self._say_hello()
                case RestartRank(_, device, generation):
                    rank = self._ranks.get(device)
                    if rank and rank.generation == generation:
                        rank.process.kill()

    def _reap(self, rank: RankProcess) -> None:
        if rank.process.poll() is None:
            return
        self._forward_output(rank)
        self._unwatch(rank.output, rank.pidfd)
        rank.close()
        if rank is self._spare:
            self._spare, self._spare_at = None, time.monotonic() + MAX_BACKOFF_S
            return
        del self._ranks[rank.device]
        self._dealer.send(RankExited(self._node, rank.device, rank.generation, rank.exit_reason()))
        if rank.process.returncode == 0:  # told to go: not to be replaced
            return
        now = time.monotonic()
        num_deaths = self._num_young_deaths[rank.device] + 1 if now - rank.started_at < YOUNG_S else 0
        self._num_young_deaths[rank.device] = num_deaths
        self._starts[rank.device] = (now + backoff_s(num_deaths), rank.generation + 1)

    def _forward_output(self, rank: RankProcess) -> None:
        lines = rank.read_lines()
        if lines is None:
            self._unwatch(rank.output)
            return
        name = "spare" if rank.device == NO_DEVICE else rank.device
        prefix = f"[{self._node}:{name}] ".encode()
        sys.stderr.buffer.write(b"".join(prefix + line + b"\n" for line in lines))
        sys.stderr.buffer.flush()

    def _watch(self, source: object, handler: Callable[[], None]) -> None:
        self._poller.register(source, zmq.POLLIN)
        self._handlers[source] = handler

    def _unwatch(self, *sources: object) -> None:
        for source in sources:
            if self._handlers.pop(source, None):
                self._poller.unregister(source)

    def _kill_ranks(self) -> None:
        processes = [*self._ranks.values(), *([self._spare] if self._spare else [])]
        for process in processes:
            process.process.kill()
        for process in processes:
            process.close()


def check_name(node: str) -> None:
    """Raises ConfigError for what cannot be the name of a node that joins."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", node) or node == "local":
        raise ConfigError(f"--name is '{node}'; wanted letters, digits, '.', '_' or '-', and not 'local'")


def backoff_s(num_young_deaths: int) -> float:
    """How long the next start waits: not after the first young death in a row, then 1, 2, 4 ... seconds."""
    return 0.0 if num_young_deaths < 2 else min(MAX_BACKOFF_S, 2.0 ** (num_young_deaths - 2))


def rank_environment(num_ranks: int) -> dict[str, str]:
    """The node's cores shared out among its ranks; what the user has set stays.

    Passive waiting: a spinning OpenMP thread holds a core for a whole time slice while other ranks need it.
    """
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE", **os.environ}


def main(rank_command: list[str] = RANK_COMMAND, spare_command: list[str] | None = SPARE_COMMAND) -> None:
    parser = argparse.ArgumentParser(prog="python -m dlmserve.worker.agent", description=__doc__)
    parser.add_argument("--head", required=True, help="ZeroMQ endpoint of the head")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--devices", type=int, required=True, help="number of rank processes")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--run-dir", required=True, help="folder for the ranks' sockets")
    args = parser.parse_args()
    die_with_parent()
    leave_signals_to_head()
    try:
        node = (args.head, args.node, args.devices, args.device, args.run_dir)
        Agent(*node, rank_command, spare_command).run()
    except WorkerError as error:
        sys.exit(f"dlmserve agent: {error}")


if __name__ == "__main__":
    main()
