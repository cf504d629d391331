"""Confidence of masked positions, sampling, the choice of what is unmasked, and a CPU's products and norms.

Owns the checks of arguments and the choice of back end, made once, at import: the compiled C++ kernels, or
torch where they were not built. reference.py says what each function returns; every back end agrees with it.
Tensors on another device than the CPU take the torch path. Knows nothing of models and processes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dlmserve.kernels import reference, step, tiled
from dlmserve.kernels.reference import ALL, FACTOR, QUOTA, THRESHOLD, Rows, combine, confidence
from dlmserve.kernels.step import StepOutcome, pack, unpack

try:
    from dlmserve.kernels import native
except ImportError as error:
    native, _missing = None, str(error)

__all__ = [
    "ALL", "FACTOR", "QUOTA", "THRESHOLD", "Rows", "StepOutcome", "backend_name", "combine", "confidence",
    "head_rows", "logit_rows", "pack", "packed_weight", "rms_norm", "sample_rows", "select", "silu_gate",
    "unmask_step", "unpack",
]  # fmt: skip


def backend_name() -> str:
    """What CPU tensors run on, such as "c++ (avx2)"."""
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
    """The most probable allowed token of each row of hidden f32 [M, D], without materialising [M, V] logits.

    weight f32 or bf16 [V, D], contiguous: this rank's slice of the LM head, whose first row is token
    `token_offset`; bias f32 [V]. `banned` global ids are never the answer, but count in the sum of
    exponentials. Logits are accumulated in float32 for either dtype, on torch.get_num_threads() threads.
    Raises TypeError for a wrong dtype, ValueError for a wrong shape or layout.
    """
    _expect("hidden", hidden, (torch.float32,), 2)
    _expect("weight", weight, (torch.float32, torch.bfloat16), 2, hidden.shape[1])
    if not weight.is_contiguous():
        raise ValueError(
            f"weight has strides {weight.stride()}; wanted contiguous: slice the vocabulary by rows"
        )
    if bias is not None:
        _expect("bias", bias, (torch.float32,), 1, weight.shape[0])
    if native is None or not hidden.is_cpu:
        return tiled.head_rows(hidden, weight, token_offset, banned, bias, reference.logit_rows)
    if native.fused_pays(weight):
        return native.head_rows(hidden, weight, token_offset, banned, bias)
    return tiled.head_rows(hidden, weight, token_offset, banned, bias, native.logit_rows)


def logit_rows(logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Rows:
    """The same from given logits f32 [M, V]; a row may be followed by padding."""
    _expect("logits", logits, (torch.float32,), 2)
    return _backend(logits).logit_rows(logits, token_offset, banned)


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    step: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Rows]:
    """A token per row of logits f32 [M, V], drawn at temperature f32 [M] (0: the arg-max).

    The noise is keyed by seed, position and step, each i64 [M], and the token id: the same draw in any batch
    and for any split of the vocabulary. Returns score f32 [M], which `combine` compares across slices, and
    Rows with the raw logit of the drawn token.
    """
    _expect("logits", logits, (torch.float32,), 2)
    num_rows = logits.shape[0]
    _expect("temperature", temperature, (torch.float32,), 1, num_rows)
    for name, key in (("seed", seed), ("position", position), ("step", step)):
        _expect(name, key, (torch.int64,), 1, num_rows)
    return _backend(logits).sample_rows(logits, temperature, seed, position, step, token_offset, banned)


def select(confidence: Tensor, offsets: Tensor, rule: Tensor, value: Tensor) -> Tensor:
    """Which masked positions are unmasked, bool [M], from confidence f32 [M].

    Request r owns the rows offsets[r] to offsets[r + 1] (i64 [R + 1]) and has rule[r] (i64: THRESHOLD, QUOTA,
    FACTOR or ALL) with value[r] (f64); see reference.select. Raises ValueError for a rule or offsets that
    make no sense.
    """
    num_requests = rule.numel()
    _expect("confidence", confidence, (torch.float32,), 1)
    _expect("offsets", offsets, (torch.int64,), 1, num_requests + 1)
    _expect("rule", rule, (torch.int64,), 1, num_requests)
    _expect("value", value, (torch.float64,), 1, num_requests)
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
    return step.unmask_step(parts, offsets, rule, value, position, canvas, _backend(parts).select)


def packed_weight(weight: Tensor):
    """A native.PackedWeight of W [N, K] where the compiled product is the fastest for it, or None."""
    if native is None or not native.linear_pays() or not weight.is_cpu or weight.dtype != torch.float32:
        return None
    return native.PackedWeight(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm; x and weight f32."""
    return _backend(x).rms_norm(x, weight, eps)


def silu_gate(x: Tensor) -> Tensor:
    """See reference.silu_gate; any floating dtype."""
    return (_backend(x) if x.dtype == torch.float32 else reference).silu_gate(x)


def _backend(tensor: Tensor):
    return reference if native is None or not tensor.is_cpu else native


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
