"""Compiles the .cu files of csrc/ to cubins with NVRTC, NVIDIA's compiler as a library: no nvcc, no GPU needed.

Owns the search for the library, which torch's CUDA builds and the wheel nvidia-cuda-nvrtc bring, and the cache of
cubins in the user's cache folder. Goes through ctypes: PyPI's Python bindings are not on every machine that has
the library. Knows nothing of torch and of launching.
"""

import ctypes
import hashlib
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path

from dlmserve.errors import KernelsUnavailable

CSRC = Path(__file__).parent / "csrc"
SOURCES = ("rows.cu", "unmask.cu")
# Lambdas carry no __device__; -v: registers and spills, in the log.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")

log = logging.getLogger(__name__)


def cubin(source: str, arch: str, cuda_major: int | None = None) -> bytes:
    """The machine code of a file of csrc/ for an architecture such as "sm_90", compiled on first use.

    cuda_major: that of torch, whose version of the library is preferred. Raises KernelsUnavailable.
    """
    library = _library(cuda_major)
    cached = _cache_folder() / f"{Path(source).stem}-{arch}-{_key(library, source, arch)}.cubin"
    try:
        return cached.read_bytes()
    except OSError:
        code, _ = compile_source(source, arch, cuda_major)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}")
        partial.write_bytes(code)
        partial.replace(cached)  # at once: other ranks may read it now
    except OSError as error:
        log.warning("cannot cache a compiled kernel: %s; every start compiles it again", error)
    return code


def compile_source(source: str, arch: str, cuda_major: int | None = None) -> tuple[bytes, str]:
    """(cubin, log of the compiler) without the cache. Raises KernelsUnavailable, with that log."""
    library = _library(cuda_major)
    headers = _headers()
    program = c_void_p()
    created = library.nvrtcCreateProgram(
        byref(program),
        (CSRC / source).read_bytes(),
        source.encode(),
        len(headers),
        (c_char_p * len(headers))(*headers.values()),
        (c_char_p * len(headers))(*(name.encode() for name in headers)),
    )
    _check(library, created, source)
    try:
        options = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in OPTIONS)]
        status = library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
        messages = _read(library, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
        _check(library, status, f"{source} for {arch}", messages)
        return _read(library, "CUBIN", program), messages
    finally:
        library.nvrtcDestroyProgram(byref(program))


def resources(messages: str) -> dict[str, dict[str, int]]:
    """Per kernel of a compiler's log: `registers` a thread, `stack_bytes`, `spilled_bytes`."""
    pattern = (
        r"Function properties for (\w+)\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*?Used (\d+) registers"
    )
    return {
        name: {"registers": int(registers), "stack_bytes": int(stack), "spilled_bytes": int(out) + int(back)}
        for name, stack, out, back, registers in re.findall(pattern, messages)
    }


def version(cuda_major: int | None = None) -> tuple[int, int]:
    """That of the library. Raises KernelsUnavailable where there is none."""
    library = _library(cuda_major)
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    return major.value, minor.value


@lru_cache
def _library(cuda_major: int | None) -> ctypes.CDLL:
    tried = []
    for path in _candidates(cuda_major):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
            continue
        library.nvrtcCreateProgram.argtypes = (
            POINTER(c_void_p), c_char_p, c_char_p, c_int, POINTER(c_char_p), POINTER(c_char_p),
        )  # fmt: skip
        library.nvrtcCompileProgram.argtypes = (c_void_p, c_int, POINTER(c_char_p))
        library.nvrtcGetErrorString.restype = c_char_p
        return library
    raise KernelsUnavailable(
        f"no NVRTC library ({'; '.join(tried)}): install a CUDA build of torch or pip install nvidia-cuda-nvrtc"
    )


def _candidates(cuda_major: int | None) -> Iterator[str]:
    """Paths and names for dlopen: the libraries in wheels, torch's version first, then the system's."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(path) for path in nvidia.submodule_search_locations or ()] if nvidia else []
    wheels = sorted(path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*"))
    for path in sorted(wheels, key=lambda path: path.suffix != f".{cuda_major}"):
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))  # NVRTC looks for it by name only: loaded before, it is found
        yield str(path)
    if cuda_major is not None:
        yield f"libnvrtc.so.{cuda_major}"
    yield "libnvrtc.so"


def _check(library: ctypes.CDLL, status: int, what: str, messages: str = "") -> None:
    if status:
        reason = library.nvrtcGetErrorString(status).decode()
        raise KernelsUnavailable(f"NVRTC cannot compile {what}: {reason}; {messages or 'no further message'}")


def _read(library: ctypes.CDLL, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(CSRC.glob("*.cuh"))}


def _key(library: ctypes.CDLL, source: str, arch: str) -> str:
    major, minor = c_int(), c_int()
    library.nvrtcVersion(byref(major), byref(minor))
    parts = [(CSRC / source).read_bytes(), *_headers().values()]
    parts += [" ".join((*OPTIONS, arch, f"{major.value}.{minor.value}")).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlmserve" / "cubins"
