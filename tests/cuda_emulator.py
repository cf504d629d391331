"""Runs the kernels of csrc/*.cu on the CPU: builds tests/cuda_emulator.cpp once, and launches by name."""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from functools import lru_cache
from pathlib import Path

from dlmserve.kernels.driver import Argument
from dlmserve.kernels.nvrtc import CSRC

ORDERS = ("forward", "reversed", "random")


@lru_cache
def library() -> ctypes.CDLL:
    """Raises OSError where there is no g++, CalledProcessError where the sources do not compile."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "cuda_emulator.so"
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-fno-gnu-unique"]
        command += ["-Wall", "-Werror", "-Wno-unknown-pragmas", f"-I{here}", f"-I{CSRC}"]
        command += ["-o", str(built), str(here / "cuda_emulator.cpp")]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(built))
    loaded.launch.argtypes = (c_char_p, c_uint, c_uint, c_int, POINTER(c_void_p), c_int, c_uint)
    loaded.launch.restype = c_char_p
    return loaded


def launcher(order: str):
    """The stand-in for the driver. order: in which the threads of a block, and the blocks, run."""

    def launch(kernel: str, grid: tuple[int, int], num_threads: int, arguments: Sequence[Argument]) -> None:
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        failed = library().launch(kernel.encode(), *grid, num_threads, pointers, ORDERS.index(order), 1)
        if failed:
            raise RuntimeError(f"{kernel}: {failed.decode()}")

    return launch
