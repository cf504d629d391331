"""What the host code of a step asks of its device: memory to stage copies in, one copy each way, graphs, waiting.

`Device` is the CPU: copies cost nothing, and work runs when its result is asked for. `CudaDevice` is a GPU: work is
queued at once and runs beside the host. The engine is written once, for both. Knows nothing of models or requests.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from dlmserve.errors import DeviceLost, OutOfMemory

Wait = Callable[[], list[np.ndarray]]
_ALIGNMENT = 16  # bytes; the widest load of a kernel
_OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_TORCH_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
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

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raises OutOfMemory or DeviceLost for torch's errors of the device."""
        try:
            yield
        except RuntimeError as error:
            # A graph's capture that fails raises once more at its end, and hides why.
            for seen in (error, error.__context__):
                if seen is not None and _is_out_of_memory(seen):
                    raise OutOfMemory(
                        f"{self.name} ran out of memory: {_first_line(seen)}; lower --memory-fraction or "
                        "--max-num-seqs, or use a higher TP degree"
                    ) from error
            text = _first_line(error)
            if "CUDA error" in text or "cuDNN error" in text:
                raise DeviceLost(
                    f"{self.name} is lost: {text}; its process starts again, and if that does not help, look at "
                    "what nvidia-smi and dmesg say of it"
                ) from error
            raise


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
        self._host_out = self._pinned(1 << 16)
        self._graph_pool = self._side = None

    def buffers(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        return self._pinned(num_bytes), torch.empty(num_bytes, dtype=torch.uint8, device=self.name)

    def upload(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host, non_blocking=True)

    def start(self, work: Callable[[], list[Tensor]]) -> Wait:
        tensors = work()
        packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        if len(packed) > len(self._host_out):
            self._host_out = self._pinned(2 * len(packed))
        arrived = self._host_out[: len(packed)]
        self._download(packed, arrived)
        synchronise = self._mark()

        def wait() -> list[np.ndarray]:
            synchronise()
            sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
            parts = zip(arrived.split(sizes), tensors, strict=True)
            return [part.clone().view(tensor.dtype).view(tensor.shape).numpy() for part, tensor in parts]

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

    def _pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _download(self, packed: Tensor, arrived: Tensor) -> None:
        arrived.copy_(packed, non_blocking=True)

    def _mark(self) -> Callable[[], None]:
        """What waits for all that is queued up to now."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.name))
        return event.synchronize


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
        self._bytes = self._host.numpy()

    def put(self, arrays: dict[str, np.ndarray], wanted: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors of the `wanted` names (all of them), in the arrays' dtypes and shapes.

        They are valid until the next call; a tensor's address follows from the sizes of the arrays before it.
        """
        places, end = {}, 0
        for name, array in arrays.items():
            places[name] = end
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._bytes):
            if not self._grows:
                raise ValueError(
                    f"{end} bytes to stage; wanted at most {len(self._bytes)}: enlarge the buffer"
                )
            self._make_buffers(2 * end)
        for name, array in arrays.items():
            place = self._bytes[places[name] : places[name] + array.nbytes]
            place.view(array.dtype)[:] = array.reshape(-1)
        self._device.upload(self._host[:end], self._on_device[:end])
        return {
            name: self._on_device[places[name] : places[name] + arrays[name].nbytes]
            .view(_TORCH_DTYPES[arrays[name].dtype])
            .view(arrays[name].shape)
            for name in (arrays if wanted is None else wanted)
        }
