"""A rank process: one device for the life of its node, member of one model instance after another.

Owns the life cycle, free -> Form -> leader or follower -> Dissolve -> free, and says how each membership
ended. Knows nothing of what a step does, nor of other devices. `main` imports torch only when the process is
tied to its agent: with it, or at a Shutdown, the process goes; signals meant for the head are ignored.
"""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dlmserve import keys
from dlmserve.checkpoint import find_copy
from dlmserve.errors import DlmServeError, OutOfMemory, WorkerError
from dlmserve.messages import (
    PROTOCOL_VERSION,
    Dissolved,
    Form,
    Formed,
    FormFailed,
    Heartbeat,
    Introduce,
    RankHello,
    Shutdown,
)
from dlmserve.transport import Dealer, PlanReceiver
from dlmserve.worker.lifeline import die_with_parent, leave_signals_to_head, start_heartbeat, yield_to_head
from dlmserve.worker.step_loop import Engine, follow, lead

if TYPE_CHECKING:
    from dlmserve.profiles import Points
    from dlmserve.worker.parallel import Group
    from dlmserve.worker.shards import KeptShards

log = logging.getLogger("dlmserve.rank")

MakeGroup = Callable[[str, int, int, str, float], "Group"]
BuildEngine = Callable[[Form, str, "Group", "KeptShards"], Engine]
StepTimes = Callable[[Form, str, "Group", Engine, bool], tuple["Points", str]]


class Rank:
    """`device` is "cpu" or "cuda:N"; the three functions are this package's, unless in a test."""

    def __init__(
        self,
        head: Dealer,
        plans: PlanReceiver,
        device: str,
        make_group: MakeGroup,
        build_engine: BuildEngine,
        kept: "KeptShards",
        step_times: StepTimes,
        hello: RankHello,
        model: str | None,
    ) -> None:
        """`model`: the folder of this node's copy of the model; None: what the head names."""
        self._head, self._plans, self._device, self._kept = head, plans, device, kept
        self._hello, self._model = hello, model
        self._make_group, self._build_engine, self._step_times = make_group, build_engine, step_times
        self._is_new = True  # in no instance yet: time to measure, which a regroup must not wait for

    def run(self) -> None:
        """Raises SystemExit when the head says Shutdown."""
        self._head.send(self._hello)
        while True:
            match self._head.receive():
                case Form() as form:
                    self._join(form)
                    self._head.send(self._hello)  # the head may be another one by now
                case Introduce():
                    self._head.send(self._hello)
                case Shutdown():
                    raise SystemExit
            # whatever else arrives was meant for an instance that is gone

    def _join(self, form: Form) -> None:
        """One membership, from Form until this rank is free again."""
        began_at = time.monotonic()
        group = engine = None
        formed, why = False, ""
        try:
            group = self._make_group(
                form.key, form.tp_rank, form.tp_degree, self._device, form.collective_timeout_s
            )
            form = self._with_own_copy(form)
            engine = self._build_engine(form, self._device, group, self._kept)
            load_s = time.monotonic() - began_at
            points, source = self._step_times(form, self._device, group, engine, self._is_new)
            self._is_new = False
            details = f"{engine.details}, step times {source}"
            ready = (engine.num_pages, load_s, details, engine.token_s, engine.num_bytes_read, points)
            self._head.send(Formed(form.instance, form.tp_rank, *ready))
            formed = True
            if form.tp_rank == 0:
                lead(form, engine, self._head)
            else:
                follow(form, engine, self._head, self._plans)
        except Exception as error:
            why = str(error) if isinstance(error, DlmServeError) else f"{type(error).__name__}: {error}"
            log.exception("rank %d of instance %s is lost", form.tp_rank, form.instance)
            if not is_device_usable(self._device, error):
                os._exit(1)  # the agent reports the line above and starts this device afresh
        finally:
            if engine is not None:
                self._kept.keep(form.model, engine.shards())
                engine.close()
            if group is not None:
                group.close()
        group = engine = None
        gc.collect()  # the next instance needs the memory of this one
        left = Dissolved if formed else FormFailed
        self._head.send(left(form.instance, form.tp_rank, why))

    def _with_own_copy(self, form: Form) -> Form:
        """Raises CheckpointError where this node's model is not the head's."""
        model = form.model
        with_weights = model.load_format != "dummy"
        folder = find_copy(model.path, model.name, model.fingerprint, with_weights, self._model)
        return replace(form, model=replace(model, path=folder))


def is_device_usable(device: str, error: Exception) -> bool:
    """Whether the process can form another instance after this error.

    A CPU always can. On a GPU a broken collective leaves a kernel on the stream that never ends, and a lost device
    makes the CUDA context useless; running out of memory, and what else was raised on purpose, do no harm.
    """
    if device == "cpu" or isinstance(error, OutOfMemory):
        return True
    return isinstance(error, DlmServeError) and not isinstance(error, WorkerError)


def import_all() -> None:
    """What takes long; not before the process is tied to its parent."""
    import torch  # noqa: F401

    from dlmserve.worker import build, parallel, profiler, shards  # noqa: F401


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dlmserve.worker.rank", description="Run by the agent.")
    parser.add_argument("--head", required=True, help="ZeroMQ endpoint of the head")
    parser.add_argument("--node", required=True)
    parser.add_argument("--index", type=int, required=True, help="number of the device on its node")
    parser.add_argument("--device", required=True, help="cpu or cuda:N")
    parser.add_argument("--generation", type=int, required=True, help="how often this rank was started")
    parser.add_argument("--run-dir", required=True, help="folder for sockets")
    parser.add_argument("--parent", type=int, required=True, help="pid of the agent")
    parser.add_argument("--keys", help="file of the node's keys")
    parser.add_argument("--model", help="folder of this node's copy of the model")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    leave_signals_to_head()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")

    import torch

    from dlmserve.worker.build import build_engine
    from dlmserve.worker.parallel import make_group
    from dlmserve.worker.profiler import step_times
    from dlmserve.worker.shards import KeptShards

    if args.device == "cpu":
        yield_to_head()
    else:
        torch.cuda.set_device(args.device)
        torch.empty(1, device=args.device)  # makes the context now, not while an instance is formed
    identity = f"{args.node}:{args.index}:{args.generation}"
    own_keys = keys.read(args.keys, "node") if args.keys else None
    head = Dealer(args.head, identity, own_keys)
    plans = PlanReceiver(f"ipc://{args.run_dir}/plan-{os.getpid()}.sock")
    me = (args.node, args.index, args.generation)
    hello = RankHello(PROTOCOL_VERSION, *me, os.getpid(), args.device, plans.endpoint)
    start_heartbeat(args.head, identity, Heartbeat(*me), own_keys)

    def meet(key: str, *group: Any) -> "Group":
        return make_group(os.path.join(args.run_dir, f"{key}.store"), *group)

    try:
        kept = KeptShards()
        Rank(head, plans, args.device, meet, build_engine, kept, step_times, hello, args.model).run()
    except SystemExit:
        os._exit(0)  # at once: no thread of torch, NCCL or ZeroMQ is waited for


if __name__ == "__main__":
    main()
