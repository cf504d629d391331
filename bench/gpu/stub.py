"""A GPU that is none: CudaDevice with its few calls of torch.cuda done on the CPU, and one whose work costs nothing.

Of the kernels of csrc/*.cu only the decision does anything in the second: each request's first row is unmasked.
"""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlmserve import kernels
from dlmserve.kernels import chunked, cuda
from dlmserve.worker.device import CudaDevice

TOKEN, CONFIDENCE = 7, 0.5
POISON = 0x7F  # in buffers that nothing was written to


class HostGpu(CudaDevice):
    """Host and device buffers are two, as there; everything is done at once."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def buffers(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        return self._pinned(num_bytes), self._pinned(num_bytes)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        work()
        return work

    def wait(self) -> None:
        pass

    def free_bytes(self) -> tuple[int, int] | None:
        return None

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def _mark(self) -> Callable[[], None]:
        return self.wait


class HostClock:
    """CPU time of this thread, ns, around the device: [outcome arrived, next replay queued] for each pair of steps.

    `spent_ns`: what the stub itself took since the last outcome arrived, which is nobody's.
    """

    def __init__(self) -> None:
        self.critical_ns: list[int] = []
        self.whole_ns: list[int] = []  # from one replay to the next, less what the stub took
        self.spent_ns = 0
        self._arrived: int | None = None
        self._replayed: int | None = None

    def arrived(self) -> None:
        self._arrived = time.thread_time_ns()

    def replayed(self) -> None:
        now = time.thread_time_ns()
        if self._arrived is not None and self._replayed is not None:
            self.critical_ns.append(now - self._arrived)
            self.whole_ns.append(now - self._replayed - self.spent_ns)
        self._arrived, self._replayed, self.spent_ns = None, time.thread_time_ns(), 0

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        began = time.thread_time_ns()
        yield
        self.spent_ns += time.thread_time_ns() - began


class IdleGpu(HostGpu):
    """A replay returns at once what its capture computed; `clock` hears of outcomes and replays."""

    def __init__(self, clock: HostClock) -> None:
        super().__init__()
        self._clock = clock

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = work()

        def replay() -> Tensor:
            self._clock.replayed()
            return out

        return replay

    def _mark(self) -> Callable[[], None]:
        return self._clock.arrived


@contextmanager
def idle_kernels(clock: HostClock) -> Iterator[None]:
    """While it lasts, the host code of the CUDA kernels runs for CPU tensors; launches and the head's product not."""

    def launch(kernel: str, grid: tuple[int, int], num_threads: int, arguments: Sequence[Any]) -> None:
        (c_void_p * len(arguments))(
            *(ctypes.addressof(argument) for argument in arguments)
        )  # as the driver does
        if kernel == "unmask_step":
            with clock.not_counted():
                _unmask_first_rows(arguments[2], arguments[-1])

    found = cuda.CudaKernels(launch, num_processors=132, memory_bytes=140 << 30)
    before = kernels._on_device, chunked.logits
    kernels._on_device = lambda tensor: found
    chunked.logits = lambda hidden, weight: hidden.new_empty(len(hidden), len(weight))
    try:
        yield
    finally:
        kernels._on_device, chunked.logits = before


def _unmask_first_rows(requests: Any, outcome: Any) -> None:
    def array(pointer: int, kind: Any, length: int) -> np.ndarray:
        return np.ctypeslib.as_array((kind * length).from_address(pointer))

    num_rows = requests.num_rows
    # Requests come without their number; the offsets end with that of the rows.
    array(outcome.token, c_int64, num_rows)[:] = TOKEN
    array(outcome.confidence, c_float, num_rows)[:] = CONFIDENCE
    unmask = array(outcome.unmask, ctypes.c_bool, num_rows)
    unmask[:] = False
    at = 0
    offsets = ctypes.cast(requests.offsets, ctypes.POINTER(c_int64))
    while offsets[at] < num_rows:
        unmask[offsets[at]] = True
        at += 1
