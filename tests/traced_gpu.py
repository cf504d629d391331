"""A GPU of shapes, dtypes and devices, without values: torch's fake tensors, on the operators that a real one runs.

What mixes devices or dtypes, or takes an operator's arguments wrongly, fails here as it would there; a model of full
size costs no memory. Kernels of csrc/*.cu are noted instead of launched.
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from dlmserve import kernels
from dlmserve.kernels import cuda
from dlmserve.worker import build
from dlmserve.worker.device import CudaDevice, Wait
from dlmserve.worker.parallel import Group
from dlmserve.worker.weights import Ask

DEVICE = "cuda:0"


class HostBuffer:
    """What the device asks of a host tensor, over memory that fake tensors leave alone."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, part: slice) -> "HostBuffer":
        return HostBuffer(self._array[part])

    def numpy(self) -> np.ndarray:
        return self._array


class TracedGpu(CudaDevice):
    """Host buffers are real; what comes back is made up: few tokens, tiny confidences, about half unmasked."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        super().__init__(DEVICE)

    def buffers(self, num_bytes: int) -> tuple[HostBuffer, Tensor]:  # type: ignore[override]
        return self._pinned(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)

    def upload(self, host: HostBuffer, device: Tensor) -> None:  # type: ignore[override]
        assert device.is_cuda and len(host) == len(device)

    def start(self, work: Callable[[], list[Tensor]]) -> Wait:
        wait = super().start(work)

        def wait_for_values() -> list[np.ndarray]:
            with unset_fake_temporarily():
                return wait()

        return wait_for_values

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = work()
        return lambda: out

    def wait(self) -> None:
        pass

    def free_bytes(self) -> None:
        return None

    def peak_bytes(self, work: Callable[[], object]) -> int:
        raise AssertionError("nothing to measure here")

    def _pinned(self, num_bytes: int) -> HostBuffer:  # type: ignore[override]
        return HostBuffer(np.zeros(num_bytes, dtype=np.uint8))

    def _download(self, packed: Tensor, arrived: HostBuffer) -> None:  # type: ignore[override]
        assert packed.is_cuda and packed.dtype == torch.uint8 and len(packed) == len(arrived)
        arrived.numpy()[:] = self._random.integers(0, 2, len(arrived), dtype=np.uint8)

    def _mark(self) -> Callable[[], None]:
        return lambda: None


class EmptyWeights:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def get(self, ask: Ask) -> Tensor:
        shape = list(ask.shape)
        if ask.dim is not None:
            shape[ask.dim] = ask.stop - ask.start
        return torch.empty(shape, dtype=self._dtype, device=DEVICE)


class TracedGroup(Group):
    """One rank of `size` whose collectives only have shapes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce_(self, t: Tensor) -> Tensor:
        assert t.is_cuda and t.is_contiguous()
        return t

    def all_gather(self, t: Tensor) -> Tensor:
        assert t.is_cuda
        return t.new_empty(self.size, *t.shape)


class Largest(TorchDispatchMode):
    """The most bytes that one tensor of an operator's result took."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.operator = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            # Not of views: those have the size of what they look at.
            if (
                isinstance(tensor, Tensor)
                and tensor.is_cuda
                and not func.is_view
                and tensor.nbytes > self.num_bytes
            ):
                self.num_bytes, self.operator = tensor.nbytes, str(func)
        return out


@contextmanager
def traced_gpu(monkeypatch: pytest.MonkeyPatch, launched: set[str]) -> Iterator[TracedGpu]:
    """While it lasts, tensors are fake ones; `launched` gets the names of the kernels."""

    def launch(kernel: str, grid: tuple[int, int], num_threads: int, arguments: object) -> None:
        assert 0 < grid[0] < 1 << 31 and 0 < grid[1] < 1 << 16 and num_threads % 32 == 0
        launched.add(kernel)

    def pointer(tensor: Tensor) -> int:
        assert tensor.is_cuda, "a kernel would follow a pointer into the host's memory"
        return 0

    _load_guard()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(build, "open_weights", lambda path, kind, dtype, device: EmptyWeights(dtype))
    monkeypatch.setattr(cuda, "_pointer", pointer)
    monkeypatch.setattr(
        cuda, "open_device", lambda device: (cuda.CudaKernels(launch, 132, 140 << 30), "traced")
    )
    kernels._cuda_kernels.cache_clear()
    with FakeTensorMode():
        yield TracedGpu()
    kernels._cuda_kernels.cache_clear()


@lru_cache
def _load_guard() -> None:
    if torch.version.cuda:
        return
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "fake_guard.so"
        source = Path(__file__).parent / "fake_guard.cpp"
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{root}/include",
            "-o",
            str(built),
            str(source),
        ]
        subprocess.run([*command, f"-L{root}/lib", "-lc10"], check=True)
        ctypes.CDLL(str(built))
