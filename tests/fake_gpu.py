"""A GPU that is none: CudaDevice with its few calls of torch.cuda done on the CPU, and a book of what was asked.

Host and device buffers are two, uploads are late (poison until then), and a capture replays the work it was given.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dlmserve.worker.device import CudaDevice

POISON = 0x7F


class FakeGpu(CudaDevice):
    """`memory`: (free, total) bytes and `peak`: what the largest step takes; None: pages are not sized by it."""

    def __init__(self, memory: tuple[int, int] | None = None, peak: int = 0) -> None:
        super().__init__("cpu")
        self.book: list[str] = []
        self.num_captures = 0
        self._memory, self._peak = memory, peak

    def buffers(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        return self._pinned(num_bytes), torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def upload(self, host: Tensor, device: Tensor) -> None:
        self.book.append("upload")
        super().upload(host, device)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_captures += 1
        work()

        def replay() -> Tensor:
            self.book.append("replay")
            return work()

        return replay

    def wait(self) -> None:
        self.book.append("wait")

    def free_bytes(self) -> tuple[int, int] | None:
        return self._memory

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self._peak

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def _mark(self) -> Callable[[], None]:
        self.book.append("download")
        return lambda: self.book.append("wait")
