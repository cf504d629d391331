"""The ranks of an instance as threads of this process: what a tensor-parallel step computes, without processes.

`tests/test_parallel.py` has the real groups.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from msgspec.structs import replace
from torch import Tensor

from dlmserve.messages import Command, Form
from dlmserve.worker.build import build_engine
from dlmserve.worker.engine import StepResult
from dlmserve.worker.parallel import Group

PATIENT_S = 60.0  # a rank that fails breaks the barrier at once; this is for one that hangs


class Meeting:
    """Where the ranks lay down what they bring, and take what all have brought."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=PATIENT_S)
        self.brought: list[Tensor] = [torch.empty(0)] * size


class ThreadGroup(Group):
    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def all_gather(self, t: Tensor) -> Tensor:
        self._meeting.brought[self.rank] = t.clone()
        self._meeting.barrier.wait()
        gathered = torch.stack(self._meeting.brought)
        self._meeting.barrier.wait()
        return gathered

    def all_reduce_(self, t: Tensor) -> Tensor:
        return t.copy_(self.all_gather(t).sum(0))


def decode(form: Form, tp_degree: int, commands: Sequence[Command]) -> list[list[StepResult]]:
    """The steps of each rank of a new instance that is given these commands, until it has no work."""
    meeting = Meeting(tp_degree)

    def run(rank: int) -> list[StepResult]:
        torch.set_num_threads(1)  # of this thread
        try:
            group = ThreadGroup(rank, tp_degree, meeting)
            engine = build_engine(replace(form, tp_rank=rank, tp_degree=tp_degree), "cpu", group)
            for command in commands:
                engine.apply(command)
            results = []
            while engine.has_work():
                results.append(engine.step())
                engine.check()
            return results
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(tp_degree) as pool:
        return list(pool.map(run, range(tp_degree)))
