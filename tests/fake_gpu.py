"""A GPU that is none (bench/gpu/stub.py), and a book of what was asked.

Both copies are late: a host buffer that is written before the wait for what was
queued with it, or read before it, shows. A capture replays the work it was given.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.stub import POISON, HostGpu


class FakeGpu(HostGpu):
    """`memory`: (free, total) bytes and `peak`: what the largest step takes; None: pages are not sized by it."""

    def __init__(self, memory: tuple[int, int] | None = None, peak: int = 0) -> None:
        super().__init__()
        self.book: list[str] = []
        self.num_captures = 0
        self._memory, self._peak = memory, peak
        self._uploads: list[tuple[Tensor, Tensor]] = []  # host, and what it held
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def upload(self, host: Tensor, device: Tensor) -> None:
        self.book.append("upload")
        self._check_uploads()
        self._uploads.append((host, host.clone()))
        super().upload(host, device)

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_captures += 1
        self._settle()  # as torch.cuda.graph does
        work()

        def replay() -> Tensor:
            self.book.append("replay")
            return work()

        return replay

    def wait(self) -> None:
        self.book.append("wait")
        self._settle()

    def free_bytes(self) -> tuple[int, int] | None:
        return self._memory

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self._peak

    def _download(self, packed: Tensor, arrived: Tensor) -> None:
        arrived.fill_(POISON)
        self._downloads.append((packed, arrived))

    def _mark(self) -> Callable[[], None]:
        self.book.append("download")
        return super()._mark()

    def _check_uploads(self) -> None:
        for host, before in self._uploads:
            assert torch.equal(host, before), "a host buffer was written while its copy might be on its way"

    def _settle(self) -> None:
        self._check_uploads()
        for packed, arrived in self._downloads:
            arrived.copy_(packed)
        self._uploads, self._downloads = [], []
