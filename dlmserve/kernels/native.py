"""The compiled CPU kernels of csrc/, called through ctypes, which costs little and releases the GIL.

Owns the C signatures and the choice of sizes at which the fused head pays. Importing it raises ImportError
where there is no compiled library. Arguments are checked by the package's public functions, not here.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from dlmserve.kernels.reference import Rows, bad_request

ISA_NAMES = {512: "avx512", 256: "avx2", 128: "128-bit"}


def _load() -> ctypes.CDLL:
    spec = importlib.util.find_spec("dlmserve.kernels._native")
    if spec is None or spec.origin is None:
        raise ImportError("not built; to build it: pip install --editable .")
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        raise ImportError(str(error)) from error
    slice_of = (c_int64, POINTER(c_int64), c_int64, c_int)  # token offset, banned ids, how many, threads
    rows = (c_void_p,) * 3
    library.dlmserve_head_rows.argtypes = (
        c_void_p, c_int64, c_int64, c_void_p, c_int, c_int64, c_void_p, *slice_of, *rows,
    )  # fmt: skip
    library.dlmserve_logit_rows.argtypes = (c_void_p, c_int64, c_int64, c_int64, *slice_of, *rows)
    library.dlmserve_sample_rows.argtypes = (
        c_void_p, c_int64, c_int64, c_int64, *(c_void_p,) * 4, *slice_of, c_void_p, *rows,
    )  # fmt: skip
    library.dlmserve_packed_size.argtypes = (c_int64, c_int64, c_int)
    library.dlmserve_packed_size.restype = c_int64
    library.dlmserve_pack.argtypes = (c_void_p, c_int64, c_int64, c_int, c_void_p)
    library.dlmserve_linear.argtypes = (
        c_void_p, c_int64, c_int64, c_void_p, c_int, c_int64, c_void_p, c_int, c_void_p,
    )  # fmt: skip
    library.dlmserve_norm.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_float, c_int, c_void_p)
    library.dlmserve_gate.argtypes = (c_void_p, c_int64, c_int64, c_int, c_void_p)
    library.dlmserve_select.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    library.dlmserve_select.restype = c_int64
    return library


_library = _load()


def isa_bits() -> int:
    """Vector width in use: 512 (AVX-512), 256 (AVX2) or 128 (SSE2, NEON); DLMSERVE_ISA caps it at start."""
    return _library.dlmserve_isa_bits()


def cap_isa(bits: int) -> int:
    """Uses vectors of at most `bits` from now on, for tests and benchmarks; returns the width in use."""
    return _library.dlmserve_cap_isa(bits)


def fused_pays(weight: Tensor) -> bool:
    """Whether `head_rows` is at least as fast as torch's product in tiles, for any number of rows.

    256 bits: always (bench/kernels.py). 512 bits: by measurements of an earlier version of the kernel.
    128 bits: never for float32, for which torch's product is well tuned.
    """
    if weight.dtype == torch.bfloat16:
        return True
    bits = isa_bits()
    return bits == 256 or (bits == 512 and weight.shape[1] >= 512)


def head_rows(
    hidden: Tensor,
    weight: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
    bias: Tensor | None = None,
) -> Rows:
    """As in reference.py; never materialises [M, V]."""
    hidden = hidden.contiguous()
    bias = bias if bias is None else bias.contiguous()
    rows, pointers = _new_rows(hidden.shape[0])
    _library.dlmserve_head_rows(
        hidden.data_ptr(),
        *hidden.shape,
        weight.data_ptr(),
        weight.dtype == torch.bfloat16,
        weight.shape[0],
        None if bias is None else bias.data_ptr(),
        *_slice(token_offset, banned),
        *pointers,
    )
    return rows


def logit_rows(logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Rows:
    """As in reference.py."""
    logits = _dense_rows(logits)
    rows, pointers = _new_rows(logits.shape[0])
    _library.dlmserve_logit_rows(*_matrix(logits), *_slice(token_offset, banned), *pointers)
    return rows


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    step: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Rows]:
    """As in reference.py."""
    logits = _dense_rows(logits)
    keys = [key.contiguous() for key in (temperature, seed, position, step)]
    rows, pointers = _new_rows(logits.shape[0])
    score = torch.empty_like(rows.logit)
    _library.dlmserve_sample_rows(
        *_matrix(logits),
        *(key.data_ptr() for key in keys),
        *_slice(token_offset, banned),
        score.data_ptr(),
        *pointers,
    )
    return score, rows


def select(confidence: Tensor, offsets: Tensor, rule: Tensor, value: Tensor) -> Tensor:
    """As in reference.py."""
    confidence, offsets, rule, value = (x.contiguous() for x in (confidence, offsets, rule, value))
    unmask = torch.empty_like(confidence, dtype=torch.bool)
    failed = _library.dlmserve_select(
        confidence.data_ptr(),
        confidence.shape[0],
        offsets.data_ptr(),
        rule.shape[0],
        rule.data_ptr(),
        value.data_ptr(),
        unmask.data_ptr(),
    )
    if failed >= 0:
        raise bad_request(failed, offsets, rule)
    return unmask


TILE_B, TILE_K = 128, 512  # as in csrc/gemm.inc


class PackedWeight:
    """W f32 [N, K] in the layout of the kernel's product, for the vectors in use now; takes the place of W."""

    def __init__(self, weight: Tensor) -> None:
        self.num_out, self._width = weight.shape
        self._bits = isa_bits()
        shape = (*weight.shape, self._bits)
        self._packed = torch.empty(_library.dlmserve_packed_size(*shape))
        _library.dlmserve_pack(weight.contiguous().data_ptr(), *shape, self._packed.data_ptr())

    def unpacked(self) -> Tensor:
        """W again. The layout is that of `pack` in csrc/gemm.inc."""
        weight = torch.empty(self.num_out, self._width)
        lanes, at = self._bits // 32, 0
        for tile in weight.split(TILE_B):
            num_rows = -(-len(tile) // lanes) * lanes  # padded to whole vectors
            for columns in tile.split(TILE_K, dim=1):
                for first in range(0, num_rows, 2 * lanes):
                    width, num_k = min(2 * lanes, num_rows - first), columns.shape[1]
                    panel = self._packed[at : at + num_k * width].view(num_k, width)
                    rows = columns[first : first + width]
                    rows.copy_(panel[:, : len(rows)].T)
                    at += num_k * width
        return weight

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W' + bias, f32 [T, N] from x f32 [T, K]; a row's result does not depend on the other rows."""
        x = x.contiguous()
        y = torch.empty(len(x), self.num_out)
        _library.dlmserve_linear(
            x.data_ptr(),
            len(x),
            self._width,
            self._packed.data_ptr(),
            self._bits,
            self.num_out,
            None if bias is None else bias.data_ptr(),
            torch.get_num_threads(),
            y.data_ptr(),
        )
        return y


def linear_pays() -> bool:
    """Whether `PackedWeight` beats oneDNN: measured with 256 bits (bench/kernels.py), unknown with 512."""
    return isa_bits() == 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As in reference.py."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _library.dlmserve_norm(
        x.data_ptr(), *x.shape, weight.data_ptr(), eps, torch.get_num_threads(), y.data_ptr()
    )
    return y


def silu_gate(x: Tensor) -> Tensor:
    """As in reference.py."""
    x = x.contiguous()
    y = torch.empty(len(x), x.shape[1] // 2)
    _library.dlmserve_gate(x.data_ptr(), *y.shape, torch.get_num_threads(), y.data_ptr())
    return y


def _new_rows(num_rows: int) -> tuple[Rows, tuple[int, int, int]]:
    logit, lse = torch.empty(num_rows), torch.empty(num_rows)
    token = torch.empty(num_rows, dtype=torch.int64)
    return Rows(logit, token, lse), (logit.data_ptr(), token.data_ptr(), lse.data_ptr())


def _dense_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _matrix(logits: Tensor) -> tuple[int, int, int, int]:
    return logits.data_ptr(), logits.shape[0], logits.stride(0), logits.shape[1]


def _slice(token_offset: int, banned: Sequence[int]) -> tuple:
    return token_offset, *_local_ids(tuple(banned), token_offset), torch.get_num_threads()


@lru_cache(maxsize=64)
def _local_ids(banned: tuple[int, ...], token_offset: int) -> tuple[ctypes.Array, int]:
    ids = sorted({token - token_offset for token in banned})
    return (c_int64 * len(ids))(*ids), len(ids)
