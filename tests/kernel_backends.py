"""The back ends of dlmserve.kernels that the tests of the kernels run over, and how their results are compared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dlmserve.kernels import Rows, StepOutcome, cuda, native, reference, step, tiled
from tests import cuda_emulator


class Backend(NamedTuple):
    head_rows: Callable[..., Rows]
    logit_rows: Callable[..., Rows]
    sample_rows: Callable[..., tuple[Tensor, Rows]]
    select: Callable[..., Tensor]
    unmask_step: Callable[..., StepOutcome]
    top2_logits: Callable[..., Tensor]


def in_tiles(logit_rows: Callable[..., Rows]) -> Callable[..., Rows]:
    def head_rows(hidden, weight, token_offset=0, banned=(), bias=None):
        return tiled.head_rows(hidden, weight, token_offset, banned, bias, logit_rows)

    return head_rows


CPU_BACKENDS = ("torch", "torch tiles", "c++ tiles", "c++ 128", "c++ 256", "c++ 512")
EMULATED = tuple(f"cuda {order}" for order in cuda_emulator.ORDERS)


def emulated(order: str) -> cuda.CudaKernels:
    """The CUDA back end on CPU tensors: a small device, so that rows are split and the head runs in chunks."""
    return cuda.CudaKernels(cuda_emulator.launcher(order), num_processors=2, memory_bytes=400_000)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN: what a kernel leaves out, or reads too early, shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=(*CPU_BACKENDS, *EMULATED))
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    kind, _, what = request.param.partition(" ")
    if what == "tiles":
        monkeypatch.setattr(tiled, "TILE_TOKENS", 40)  # several tiles, the last one not full
    if kind == "torch":
        head_rows = in_tiles(reference.logit_rows) if what else reference.head_rows
        yield _backend(reference, head_rows)
        return
    if kind == "cuda":
        monkeypatch.setattr(cuda, "LEAST_STRETCH", 64)
        device = emulated(what)
        with poisoned_memory():
            yield Backend(*(getattr(device, name) for name in Backend._fields))
        return
    if native is None:
        pytest.skip("the C++ kernels are not built")
    widest = native.isa_bits()
    bits = widest if what == "tiles" else int(what)
    try:
        if native.cap_isa(bits) != bits:
            pytest.skip(f"this processor has no vectors of {bits} bits")
        yield _backend(native, in_tiles(native.logit_rows) if what == "tiles" else native.head_rows)
    finally:
        native.cap_isa(widest)


def _backend(module, head_rows: Callable[..., Rows]) -> Backend:
    unmask_step = partial(step.unmask_step, select=module.select)
    return Backend(
        head_rows, module.logit_rows, module.sample_rows, module.select, unmask_step, reference.top2_logits
    )


def assert_same(seen: Rows, wanted: Rows) -> None:
    assert (seen.logit.dtype, seen.token.dtype, seen.lse.dtype) == (torch.float32, torch.int64, torch.float32)
    assert seen.token.tolist() == wanted.token.tolist()
    torch.testing.assert_close(seen.logit, wanted.logit, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(seen.lse, wanted.lse, rtol=1e-6, atol=2e-6, equal_nan=True)


def exact(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/4 below 1: exact in bf16, their products sum exactly in any order, and ties abound."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)) / 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
