"""What the host code of a step asks of its device: memory to stage copies in, one copy each way, graphs, waiting.

`Device` is the CPU: copies cost nothing, and work runs when its result is asked for. `CudaDevice` is a GPU: work is
queued at once and runs beside the host. The engine is written once, for both. Knows nothing of models or requests.
"""

from collections.abc import Callable
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from dlmserve.errors import DeviceLost, OutOfMemory

Wait = Callable[[], list[np.ndarray]]
_ALIGNMENT = 16  # bytes; the widest load of a kernel
_WINDOW = (
    4096  # bytes; copies end at multiples of it, so that there are few different ones to make tensors for
)
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
_NUMPY_DTYPES = {
    torch.uint8: np.uint8,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


class Device:
    """The CPU. `queues`: whether started work runs beside the host, which then should not decide anything within."""

    queues = False

    def __init__(self, name: str = "cpu") -> None:
        self.name = name

    def buffers(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """A host and a device buffer, uint8 [num_bytes] each; here they are one."""
        shared = torch.empty(num_bytes, dtype=torch.uint8)
        return shared, shared

    def upload(self, host: Tensor, device: Tensor) -> None:
        """Starts the copy of `host` into `device`; `host` may not change before the work queued next is done."""

    def start(self, work: Callable[[], list[Tensor]]) -> Wait:
        """Starts `work`. What is returned waits for it and gives its tensors' values, in one copy."""
        return lambda: [tensor.numpy() for tensor in work()]

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A quicker way to do `work` again and again, on the same tensors with other contents."""
        return work

    def wait(self) -> None:
        """Until all that is queued is done."""

    def free_bytes(self) -> tuple[int, int] | None:
        """Free and total device memory; None where pages are not sized by it."""
        return None

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """How much more memory than before `work` takes while it runs."""
        work()
        return 0

    def named_errors(self) -> "NamedErrors":
        """A context that raises OutOfMemory or DeviceLost for torch's errors of the device."""
        return NamedErrors(self.name)


class NamedErrors:
    """See Device.named_errors. A class, as a generator takes three times as long to go through."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, RuntimeError):
            return
        # A graph's capture that fails raises once more at its end, and hides why.
        for seen in (error, error.__context__):
            if seen is not None and _is_out_of_memory(seen):
                raise OutOfMemory(
                    f"{self._device} ran out of memory: {_first_line(seen)}; lower --memory-fraction or "
                    "--max-num-seqs, or use a higher TP degree"
                ) from error
        text = _first_line(error)
        if "CUDA error" in text or "cuDNN error" in text:
            raise DeviceLost(
                f"{self._device} is lost: {text}; its process starts again, and if that does not help, look at "
                "what nvidia-smi and dmesg say of it"
            ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def _is_out_of_memory(error: BaseException) -> bool:
    """torch's own class is of its allocator only; pinned memory, graphs and cuBLAS ask the driver."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


class CudaDevice(Device):
    """A GPU. Everything goes to torch's current stream, so what is queued later sees what was queued before."""

    queues = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._make_host_out(1 << 16)
        self._graph_pool = self._side = None

    def buffers(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        return self._pinned(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=self.name)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host, non_blocking=True)

    def start(self, work: Callable[[], list[Tensor]]) -> Wait:
        tensors = work()
        packed = _packed(tensors)
        if len(packed) > len(self._host_out):
            self._make_host_out(2 * len(packed))
        self._download(packed, self._host_out[: len(packed)])
        arrived = self._arrived[: len(packed)]
        synchronise = self._mark()

        def wait() -> list[np.ndarray]:
            synchronise()
            return _unpacked(arrived.copy(), tensors)  # the next step's may arrive soon

        return wait

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Graphs share one memory pool: an output is valid until the next replay of any of them.

        And one stream: cuBLAS keeps a workspace, 32 MiB on a Hopper, for each that it was ever called on.
        """
        with torch.cuda.device(self.name):  # whose current stream is asked for
            self._side = side = self._side or torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                work()  # libraries allocate and load on first use, which a capture does not allow
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's watchdog thread may query its events meanwhile.
            how = {"stream": side, "pool": self._graph_pool, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **how):
                out = work()
        self._graph_pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def wait(self) -> None:
        torch.cuda.synchronize(self.name)

    def free_bytes(self) -> tuple[int, int] | None:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.name)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self.name)
        before = torch.cuda.memory_allocated(self.name)
        work()
        return torch.cuda.max_memory_allocated(self.name) - before

    def _make_host_out(self, num_bytes: int) -> None:
        self._host_out = self._pinned(num_bytes)
        self._arrived = self._host_out.numpy()

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _download(self, packed: Tensor, arrived: Tensor) -> None:
        arrived.copy_(packed, non_blocking=True)

    def _mark(self) -> Callable[[], None]:
        """What waits for all that is queued up to now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.name))
        return event.synchronize


def _packed(tensors: list[Tensor]) -> Tensor:
    """Their bytes, one after the other: without a copy where there is one tensor of bytes only."""
    if len(tensors) == 1 and tensors[0].dtype == torch.uint8 and tensors[0].ndim == 1:
        return tensors[0]
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def _unpacked(raw: np.ndarray, tensors: list[Tensor]) -> list[np.ndarray]:
    """Arrays of the tensors' dtypes and shapes, which need not be aligned."""
    arrays, begin = [], 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        array = raw[begin:end].view(_NUMPY_DTYPES[tensor.dtype])
        arrays.append(array if tensor.ndim == 1 else array.reshape(tensor.shape))
        begin = end
    return arrays


def make_device(name: str) -> Device:
    """`name` is "cpu" or "cuda:N"."""
    return Device() if name == "cpu" else CudaDevice(name)


class Staging:
    """Arrays of the host as tensors of the device, all of them in one copy. One set at a time.

    With `grows` unset the device's buffer stays where it is, and what does not fit is a ValueError.
    """

    def __init__(self, device: Device, num_bytes: int = 1 << 16, grows: bool = True) -> None:
        self._device, self._grows = device, grows
        self._make_buffers(num_bytes)

    def _make_buffers(self, num_bytes: int) -> None:
        self._host, self._on_device = self._device.buffers(num_bytes)
        self._bytes = self._host.numpy().data
        self._end = 0
        self._windows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def put(self, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """Tensors in the arrays' dtypes and shapes, valid until the next call."""
        places = self.write(arrays)
        self.upload()
        return self.tensors(places, arrays)

    def write(self, arrays: dict[str, np.ndarray], begin: int = 0) -> dict[str, int]:
        """Writes the arrays one after the other from the byte `begin` on, where something else ends, or 0.

        Gives the byte that each begins at, which follows from the sizes of those before it. A buffer that grows does so
        at 0 only.
        """
        places, end = {}, begin
        for name, array in arrays.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._bytes):
            if not self._grows or begin:
                raise ValueError(
                    f"{end} bytes to stage; wanted at most {len(self._bytes)}: enlarge the buffer"
                )
            self._make_buffers(2 * end)
        for name, array in arrays.items():
            self._bytes[places[name] : places[name] + array.nbytes] = array.tobytes()
        self._end = end
        return places

    def upload(self, begin: int = 0) -> None:
        """Starts the copy of what was written: from the byte `begin` to the last `write`'s end, and a little more."""
        part = begin, min(-(-self._end // _WINDOW) * _WINDOW, len(self._bytes))
        if part not in self._windows:
            self._windows[part] = self._host[slice(*part)], self._on_device[slice(*part)]
        self._device.upload(*self._windows[part])

    def tensors(self, places: dict[str, int], arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
        """The arrays on the device; `places` has them, as `write` gave it."""
        tensors = {}
        for name, array in arrays.items():
            part = self._on_device[places[name] : places[name] + array.nbytes]
            flat = part.view(_TORCH_DTYPES[array.dtype])
            tensors[name] = flat if array.ndim == 1 else flat.view(array.shape)
        return tensors
