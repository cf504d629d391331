"""Confidence of masked positions, sampling, the choice of what is unmasked, and a CPU's products and norms.

Owns the checks of arguments and the choice of back end: for CPU tensors the compiled C++ kernels, for CUDA tensors
those of csrc/*.cu, compiled at first use, and torch where either is missing. reference.py and step.py say what each
function returns; every back end agrees with them. Knows nothing of models and processes.
"""

import logging
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dlmserve.errors import KernelsUnavailable
from dlmserve.kernels import cuda, reference, step, tiled
from dlmserve.kernels.chunked import logits, rows_at_once
from dlmserve.kernels.reference import ALL, AT_LEAST, FACTOR, QUOTA, THRESHOLD, Rows, combine, confidence
from dlmserve.kernels.step import NUM_PLANES, StepOutcome, outcome_arrays, pack, pack_whole, unpack

try:
    from dlmserve.kernels import native
except ImportError as error:
    native, _missing = None, str(error)

__all__ = [
    "ALL", "AT_LEAST", "FACTOR", "NUM_PLANES", "QUOTA", "THRESHOLD", "Rows", "StepOutcome", "backend_name", "combine",
    "confidence", "head_rows", "logit_rows", "logits", "outcome_arrays", "pack", "pack_whole", "packed_weight",
    "rms_norm", "rows_at_once", "sample_rows", "select", "silu_gate", "top2_logits", "unmask_step", "unpack",
]  # fmt: skip


log = logging.getLogger(__name__)


def backend_name(device: torch.device | str = "cpu") -> str:
    """What tensors of a device run on, such as "c++ (avx2)" or "cuda (sm_90)"."""
    device = torch.device(device)
    if device.type != "cpu":
        return _cuda_kernels(device)[1]
    if native is None:
        return f"torch (no compiled kernel: {_missing})"
    return f"c++ ({native.ISA_NAMES[native.isa_bits()]})"


def head_rows(
    hidden: Tensor,
    weight: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
    bias: Tensor | None = None,
) -> Rows:
    """The most probable allowed token of each row of hidden [M, D], without materialising [M, V] logits.

    hidden f32, or bf16, which a GPU multiplies with bf16 weights as it is. weight f32 or bf16 [V, D], contiguous:
    this rank's slice of the LM head, whose first row is token `token_offset`; bias f32 [V]. `banned` global ids are
    never the answer, but count in the sum of exponentials. Logits are accumulated in float32 for either dtype and
    never rounded to less; on the CPU on torch.get_num_threads() threads.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or layout.
    """
    _expect("hidden", hidden, (torch.float32, torch.bfloat16), 2)
    _expect("weight", weight, (torch.float32, torch.bfloat16), 2, hidden.shape[1])
    if not weight.is_contiguous():
        raise ValueError(
            f"weight has strides {weight.stride()}; wanted contiguous: slice the vocabulary by rows"
        )
    if bias is not None:
        _expect("bias", bias, (torch.float32,), 1, weight.shape[0])
    _expect_one_device(hidden, weight, *(() if bias is None else (bias,)))
    on_device = _on_device(hidden)
    if on_device is not None:
        return on_device.head_rows(hidden, weight, token_offset, banned, bias)
    hidden = hidden.float()
    if native is None or not hidden.is_cpu:
        return tiled.head_rows(hidden, weight, token_offset, banned, bias, reference.logit_rows)
    if native.fused_pays(weight):
        return native.head_rows(hidden, weight, token_offset, banned, bias)
    return tiled.head_rows(hidden, weight, token_offset, banned, bias, native.logit_rows)


def logit_rows(logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Rows:
    """The same from given logits [M, V], f32 or bf16; a row may be followed by padding."""
    _expect("logits", logits, (torch.float32, torch.bfloat16), 2)
    return _backend(logits).logit_rows(_as_kernels_take(logits), token_offset, banned)


def top2_logits(logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Tensor:
    """f32 [M, 2]: the two largest allowed logits of each row, f32 or bf16; -inf where there is none.

    Their difference is the margin by which a token leads. Those of the whole vocabulary are the top two of its
    slices' side by side: `torch.cat(slices, 1).topk(2).values`.
    """
    _expect("logits", logits, (torch.float32, torch.bfloat16), 2)
    backend = _on_device(logits) or reference
    return backend.top2_logits(_as_kernels_take(logits), token_offset, banned)


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    step: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Rows]:
    """A token per row of logits [M, V], f32 or bf16, drawn at temperature f32 [M] (0: the arg-max).

    The noise is keyed by seed, position and step, each i64 [M], and the token id: the same draw in any batch
    and for any split of the vocabulary. Returns score f32 [M], which `combine` compares across slices, and
    Rows with the raw logit of the drawn token.
    """
    _expect("logits", logits, (torch.float32, torch.bfloat16), 2)
    num_rows = logits.shape[0]
    _expect("temperature", temperature, (torch.float32,), 1, num_rows)
    for name, key in (("seed", seed), ("position", position), ("step", step)):
        _expect(name, key, (torch.int64,), 1, num_rows)
    _expect_one_device(logits, temperature, seed, position, step)
    return _backend(logits).sample_rows(
        _as_kernels_take(logits), temperature, seed, position, step, token_offset, banned
    )


def select(confidence: Tensor, offsets: Tensor, rule: Tensor, value: Tensor) -> Tensor:
    """Which masked positions are unmasked, bool [M], from confidence f32 [M].

    Request r owns the rows offsets[r] to offsets[r + 1] (i64 [R + 1]) and has rule[r] (i64: THRESHOLD, QUOTA,
    FACTOR, ALL or AT_LEAST + n) with value[r] (f64); see reference.select. Raises ValueError for a rule or offsets that
    make no sense.
    """
    num_requests = rule.numel()
    _expect("confidence", confidence, (torch.float32,), 1)
    _expect("offsets", offsets, (torch.int64,), 1, num_requests + 1)
    _expect("rule", rule, (torch.int64,), 1, num_requests)
    _expect("value", value, (torch.float64,), 1, num_requests)
    _expect_one_device(confidence, offsets, rule, value)
    return _backend(confidence).select(confidence, offsets, rule, value)


def unmask_step(
    parts: Tensor, offsets: Tensor, rule: Tensor, value: Tensor, position: Tensor, canvas: Tensor
) -> StepOutcome:
    """Everything between the ranks' exchange and the next step, for the whole batch; on a GPU in one launch.

    parts f32 [tp, 4, M]: what `pack` made on each rank, in the order of the vocabulary. offsets, rule and value
    as for `select`. Row m decides the token of canvas[position[m]] (i64 [M] into the flat i64 canvas), and
    writes it there if the rule says so and it has one. The last two of the outcome's fields follow from that:
    num_left and statistics, per request.

    Waits for nothing on a GPU, so offsets and rule are not checked there: a request whose own make no sense
    is left alone, and its num_left is -1. Elsewhere raises ValueError, like `select`.
    """
    _expect("parts", parts, (torch.float32,), 3, len(position))
    if parts.shape[1] != step.NUM_PLANES:
        raise ValueError(
            f"parts has shape {tuple(parts.shape)}; wanted [tp, {step.NUM_PLANES}, M]: use pack()"
        )
    _expect("offsets", offsets, (torch.int64,), 1, rule.numel() + 1)
    _expect("rule", rule, (torch.int64,), 1)
    _expect("value", value, (torch.float64,), 1, rule.numel())
    _expect("position", position, (torch.int64,), 1)
    _expect("canvas", canvas, (torch.int64,), 1)
    _expect_one_device(parts, offsets, rule, value, position, canvas)
    if not canvas.is_contiguous():
        raise ValueError(f"canvas has strides {canvas.stride()}; wanted contiguous: it is written in place")
    on_device = _on_device(parts)
    if on_device is not None:
        return on_device.unmask_step(parts, offsets, rule, value, position, canvas)
    return step.unmask_step(parts, offsets, rule, value, position, canvas, _backend(parts).select)


def packed_weight(weight: Tensor):
    """A native.PackedWeight of W [N, K] where the compiled product is the fastest for it, or None."""
    if native is None or not native.linear_pays() or not weight.is_cpu or weight.dtype != torch.float32:
        return None
    return native.PackedWeight(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm; x and weight f32."""
    return _cpu_backend(x).rms_norm(x, weight, eps)


def silu_gate(x: Tensor) -> Tensor:
    """See reference.silu_gate; any floating dtype."""
    return (_cpu_backend(x) if x.dtype == torch.float32 else reference).silu_gate(x)


def _backend(tensor: Tensor):
    return _on_device(tensor) or _cpu_backend(tensor)


def _cpu_backend(tensor: Tensor):
    return reference if native is None or not tensor.is_cpu else native


def _on_device(tensor: Tensor) -> cuda.CudaKernels | None:
    return _cuda_kernels(tensor.device)[0] if tensor.is_cuda else None


def _as_kernels_take(logits: Tensor) -> Tensor:
    """Only the CUDA kernels read bf16."""
    return logits if _on_device(logits) is not None else logits.float()


@lru_cache
def _cuda_kernels(device: torch.device) -> tuple[cuda.CudaKernels | None, str]:
    """The kernels of a GPU, compiled now, and their name for the log; None where torch must do their work."""
    try:
        return cuda.open_device(device)
    except KernelsUnavailable as error:
        log.warning("%s runs the confidence kernels in torch, slower: %s", device, error)
        return None, "torch"


def _expect(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], ndim: int, last: int | None = None
) -> None:
    """last: the length of the last dimension."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; wanted {' or '.join(map(str, dtypes))}: convert it first")
    if tensor.ndim != ndim or (last is not None and tensor.shape[-1] != last):
        wanted = f"{ndim} dimensions" if last is None else f"{ndim} dimensions, the last of {last}"
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; wanted {wanted}: check how the batch was built"
        )


def _expect_one_device(first: Tensor, *others: Tensor) -> None:
    """Kernels follow bare pointers: one into another memory would take the process down."""
    for other in others:
        if other.device != first.device:
            raise ValueError(
                f"tensors on {first.device} and {other.device}; wanted all on one device: copy a step's inputs there"
            )
