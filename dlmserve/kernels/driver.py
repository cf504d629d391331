"""Loads the compiled CUDA kernels into the driver and launches them on torch's current stream.

Owns the driver's C interface, through ctypes on the libcuda that every GPU machine has. Knows nothing of what the
kernels do. Launches can be captured in a CUDA graph: they wait for nothing.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_uint, c_void_p

import torch

from dlmserve.errors import KernelsUnavailable
from dlmserve.kernels import nvrtc

Argument = ctypes._SimpleCData | ctypes.Structure


class Driver:
    """The kernels of one device. Raises KernelsUnavailable where they cannot be compiled or loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        self._cuda = _open_libcuda()
        self._kernels: dict[str, c_void_p] = {}
        cuda_major = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else None
        self._libraries = [self._load(nvrtc.cubin(source, self.arch, cuda_major)) for source in nvrtc.SOURCES]

    def __call__(
        self, kernel: str, grid: tuple[int, int], num_threads: int, arguments: Sequence[Argument]
    ) -> None:
        """Enqueues one launch; the arguments are copied at once. Raises RuntimeError where the driver refuses."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream().cuda_stream
            status = self._cuda.cuLaunchKernel(
                self._kernel(kernel), *grid, 1, num_threads, 1, 1, 0, c_void_p(stream), pointers, None
            )
        if status:
            raise RuntimeError(
                f"the launch of {kernel} with {num_threads} threads in a grid of {grid} failed, CUDA error: "
                f"{self._reason(status)}; an earlier kernel may be to blame: set CUDA_LAUNCH_BLOCKING=1"
            )

    def _load(self, cubin: bytes) -> c_void_p:
        library = c_void_p()
        status = self._cuda.cuLibraryLoadData(byref(library), cubin, None, None, 0, None, None, 0)
        if status:
            raise KernelsUnavailable(
                f"the driver refuses the kernels compiled for {self.arch}: {self._reason(status)}"
            )
        return library

    def _kernel(self, name: str) -> c_void_p:
        """A context-independent handle, which cuLaunchKernel takes as a function of the current context."""
        if name not in self._kernels:
            found = c_void_p()
            for library in self._libraries:
                if self._cuda.cuLibraryGetKernel(byref(found), library, name.encode()) == 0:
                    break
            self._kernels[name] = found
        return self._kernels[name]

    def _reason(self, status: int) -> str:
        text = c_char_p()
        self._cuda.cuGetErrorString(status, byref(text))
        return f"{text.value.decode() if text.value else 'unknown error'} ({status})"


def _open_libcuda() -> ctypes.CDLL:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        load, launch = cuda.cuLibraryLoadData, cuda.cuLaunchKernel
        cuda.cuLibraryGetKernel.argtypes = (c_void_p, c_void_p, c_char_p)
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"no CUDA driver of version 12 or newer: {error}") from error
    load.argtypes = (c_void_p, c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint)
    launch.argtypes = (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p)
    return cuda
