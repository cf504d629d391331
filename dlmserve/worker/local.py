"""An instance inside the calling process, for `LLM`: rank 0 here, the other ranks as child processes that follow.

The children apply the same commands and run the same steps (see engine.py); they end with the pipe to this process.
"""

import os
import tempfile
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from dlmserve.errors import ConfigError, WorkerError
from dlmserve.messages import Command, Form
from dlmserve.worker.build import build_engine
from dlmserve.worker.engine import Engine, StepResult
from dlmserve.worker.hidden_reader import HiddenReader
from dlmserve.worker.parallel import make_group


def pick_device(name: str) -> str:
    """ "auto": the GPU where there is one. Raises ConfigError for "cuda" without one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; wanted auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda' but torch sees no GPU; use 'cpu', or install a CUDA build of torch"
        )
    return "cuda:0" if name != "cpu" and torch.cuda.is_available() else "cpu"


class LocalInstance:
    """`form.tp_degree` ranks; the engine's methods, carried out on all of them."""

    def __init__(self, form: Form, device: str) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        self._pending: list[Command] = []
        if form.tp_degree > 1:
            form = self._start_followers(form, device)
        self._group = make_group(form.key, 0, form.tp_degree, device, form.collective_timeout_s)
        self._engine = build_engine(form, device, self._group)

    def _start_followers(self, form: Form, device: str) -> Form:
        from msgspec.structs import replace

        folder = tempfile.mkdtemp(prefix="dlmserve-")
        form = replace(form, key=os.path.join(folder, "store"))
        context = get_context("spawn")
        for rank in range(1, form.tp_degree):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_follow,
                args=(theirs, replace(form, tp_rank=rank), _rank_device(device, rank)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return form

    @property
    def details(self) -> str:
        return self._engine.details

    def apply(self, command: Command) -> None:
        self._pending.append(command)

    def step(self) -> StepResult:
        commands, self._pending = self._pending, []
        self._tell(("step", commands))
        for command in commands:
            self._engine.apply(command)
        return self._engine.step()

    def read_hidden(self, reader: HiddenReader) -> None:
        self._engine.hidden_reader = reader

    def logits(self, tokens: list[int], block_length: int) -> torch.Tensor:
        self._tell(("logits", (tokens, block_length)))
        return self._engine.logits(tokens, block_length)

    def _tell(self, order: tuple) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(order)
            except OSError as error:
                raise WorkerError(f"a rank of this instance is gone: {error}; make a new LLM") from error

    def check(self) -> None:
        self._engine.check()

    def close(self) -> None:
        """Ends the child processes; the instance is of no use afterwards."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # nothing of it is worth an orderly end of torch, which takes a second
            process.join()
        self._pipes, self._processes = [], []
        self._engine.close()
        self._group.close()


def _rank_device(device: str, rank: int) -> str:
    return "cpu" if device == "cpu" else f"cuda:{rank}"


def _follow(pipe: Connection, form: Form, device: str) -> None:
    """A child rank: the same engine on the same orders, until the pipe is closed."""
    if device != "cpu":
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // form.tp_degree))  # ranks share the cores
    group = make_group(form.key, form.tp_rank, form.tp_degree, device, form.collective_timeout_s)
    engine: Engine = build_engine(form, device, group)
    while True:
        try:
            what, content = pipe.recv()
        except EOFError:
            return
        if what == "logits":
            engine.logits(*content)
            continue
        for command in content:
            engine.apply(command)
        engine.step()
