"""The engine on a GPU that has shapes, dtypes and devices but no values, at the width of real models, in bf16."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gpu.setup import LLADA_8B
from dlmserve.errors import ConfigError
from dlmserve.messages import Admit, Cancel, Decoding, Form, ModelSpec
from dlmserve.worker import memory
from dlmserve.worker.attention import choose
from dlmserve.worker.build import build_on
from dlmserve.worker.engine import Engine
from dlmserve.worker.models import decoder
from dlmserve.worker.parallel import SOLO, Group
from tests.traced_gpu import DEVICE, Largest, TracedGpu, TracedGroup, traced_gpu

LLADA = LLADA_8B | {"n_layers": 2}
DREAM = {
    "architectures": ["DreamModel"],
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151643,
    "mask_token_id": 151666,
}
LLADA2 = {
    "architectures": ["LLaDA2MoeModelLM"],
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 5120,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 512,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "vocab_size": 157184,
    "max_position_embeddings": 32768,
    "rope_theta": 600000,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 156892,
    "mask_token_id": 156895,
}
FAMILIES = {"llada": LLADA, "dream": DREAM, "llada2": LLADA2}
PROMPT, OUTPUT, BLOCK = 200, 64, 32


def admit(request: int, family: str = "llada", **decoding: object) -> Admit:
    options = {"block_length": BLOCK, "ignore_eos": True, **decoding}
    canvas = [5] * PROMPT + [FAMILIES[family]["mask_token_id"]] * OUTPUT
    return Admit(request, canvas, PROMPT, len(canvas), len(canvas), Decoding(**options))  # type: ignore[arg-type]


EVERY_KIND = [
    {},
    {"cache": "prefix", "rule": "factor", "value": 2.0},
    {"cache": "none", "rule": "steps", "value": 8.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
]


@pytest.fixture
def launched() -> set[str]:
    return set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, launched: set[str]) -> Iterator[TracedGpu]:
    with traced_gpu(monkeypatch, launched) as device:
        yield device


@pytest.fixture
def make_form(tmp_path: Path) -> Callable[..., Form]:
    def make(
        family: str = "llada",
        attention: str = "varlen",
        page_size: int = 32,
        group: Group = SOLO,
        dtype: str = "auto",
        max_num_seqs: int = 6,
    ) -> Form:
        config = FAMILIES[family]
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = ModelSpec(str(tmp_path), "auto", dtype, config["mask_token_id"], [config["eos_token_id"]])
        limits = (512, max_num_seqs, 2000, page_size, 10.0)
        return Form("i", group.rank, group.size, [], "", model, *limits, attention=attention)

    return make


@pytest.fixture
def make_engine(device: TracedGpu, make_form: Callable[..., Form]) -> Callable[..., Engine]:
    def make(*args: object, group: Group = SOLO, **more: object) -> Engine:
        return build_on(device, make_form(*args, group=group, **more), group, with_graphs=True)

    return make


def run(engine: Engine, commands: list[Admit], num_steps: int = 5) -> set[bool]:
    """Whether there were recompute steps, and others."""
    for command in commands:
        engine.apply(command)
    kinds: set[bool] = set()
    for _ in range(num_steps):
        result = engine.step()
        assert not result.failed
        kinds |= {step.recompute for step in result.requests}
    return kinds


def flash_attn(page_size: int) -> ModuleType:
    """A stand-in for the package: the signature of its function, and what its kernel asks of its arguments."""
    module = ModuleType("flash_attn")

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and cu_seqlens_q.is_contiguous()
        assert len(cu_seqlens_q) == len(cu_seqlens_k) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        if block_table is not None:
            assert k.ndim == 4 and k.shape[1] == page_size and page_size % 256 == 0
            assert block_table.dtype == torch.int32 and block_table.shape[0] == len(cu_seqlens_q) - 1
        return torch.empty_like(q)

    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("attention", "page_size", "details", "family"),
    [
        ("varlen", 32, "neighbouring pages read in place", "llada"),
        ("varlen", 256, "paged K/V read in place", "dream"),
        ("flash", 32, "flash-attn, K/V gathered", "dream"),
        ("flash", 256, "flash-attn, paged", "llada"),
        ("sdpa", 32, "sdpa per request", "dream"),
    ],
)
def test_every_request_runs_on_every_back_end(
    attention: str, page_size: int, details: str, family: str,
    make_engine: Callable[..., Engine], launched: set[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn(page_size))
    engine = make_engine(family, attention, page_size)
    assert details in engine.details and "bfloat16 on cuda:0" in engine.details and "traced" in engine.details
    assert run(engine, [admit(i, family, **kind) for i, kind in enumerate(EVERY_KIND)]) == {True, False}
    assert launched == {"best_rows_f32", "draw_rows_f32", "merge_rows", "unmask_step"}
    for i in range(len(EVERY_KIND)):
        engine.apply(Cancel(i))
    run(engine, [admit(9, family)], num_steps=3)
    assert (engine._runner.num_replays > 0) is ("in place" in details or "paged" in details)


@pytest.mark.parametrize(
    ("page_size", "details"),
    [(32, "torch varlen_attn, K/V of neighbouring pages read in place"), (256, "flash-attn, paged K/V")],
)
def test_of_two_back_ends_the_one_is_taken_that_copies_no_keys(
    page_size: int, details: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn(page_size))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose("auto", DEVICE, torch.bfloat16, 128, page_size).details.startswith(details)
    assert "flash-attn" in choose("flash", DEVICE, torch.bfloat16, 128, page_size).details


@pytest.mark.parametrize(
    ("head_dim", "capability", "why"),
    [(12, (9, 0), "heads of 12"), (512, (9, 0), "heads of 512"), (128, (7, 5), "cuda:0 has 7.5")],
)
def test_why_flash_attention_is_not_used_is_said(
    head_dim: int, capability: tuple[int, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert why in choose("auto", DEVICE, torch.bfloat16, head_dim, 32).details
    with pytest.raises(ConfigError, match=why):
        choose("varlen", DEVICE, torch.bfloat16, head_dim, 32)


def test_before_torch_2_13_the_operator_below_varlen_attn_is_called(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None):  # noqa: ANN001, ANN202
        raise AssertionError("it cannot read runs")

    monkeypatch.setattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn", varlen_attn)
    engine = make_engine()
    assert "torch's flash attention" in engine.details
    assert run(engine, [admit(i, **kind) for i, kind in enumerate(EVERY_KIND)]) == {True, False}


def test_experts_and_blocks_make_no_one_wait(make_engine: Callable[..., Engine]) -> None:
    """The host would wait for an expert's number of tokens: fake tensors have none to give."""
    engine = make_engine("llada2", max_num_seqs=1)
    assert "experts in grouped products" in engine.details
    assert run(engine, [admit(0, "llada2", block_causal=True)], num_steps=3) == {True, False}
    assert engine._runner.num_replays > 0


def test_experts_that_are_looped_over_are_not_captured(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "grouped_fits", lambda *args: False)
    monkeypatch.setattr(Engine, "warm_up", lambda *args: None)
    engine = make_engine("llada2", max_num_seqs=1)
    assert "no graphs, experts one by one, which no graph captures" in engine.details


def test_a_rank_of_two(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine("dream", group=TracedGroup(1, 2))
    assert run(engine, [admit(i, "dream", **kind) for i, kind in enumerate(EVERY_KIND)]) == {True, False}


def test_float32_runs_without_flash_attention(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(attention="auto", dtype="float32")
    assert "they compute in float16 or bfloat16" in engine.details
    assert run(engine, [admit(0), admit(1, temperature=0.8)], num_steps=3) == {True, False}


def test_alternatives_are_ranked_on_the_device(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.apply(admit(0, num_top=5))
    engine.launch()
    ((values, ids),) = engine.finish().top
    assert values.shape == ids.shape == (BLOCK, 5) and values.dtype == np.float32 and ids.dtype == np.int64


@pytest.mark.parametrize(
    ("decoding", "group"),
    [({}, SOLO), (EVERY_KIND[-1], SOLO), ({"num_top": 5}, SOLO), (EVERY_KIND[-1], TracedGroup(0, 2))],
)
def test_no_step_makes_a_larger_tensor_than_the_step_that_memory_is_planned_by(
    decoding: dict, group: Group, make_form: Callable[..., Form], device: TracedGpu
) -> None:
    """Such as the head's weights in float32, 2 GiB, or the logits of all rows at once, 1 GiB."""
    form = make_form(group=group, max_num_seqs=64)
    engine = build_on(device, form, group, with_graphs=False)
    with Largest() as planned, torch.inference_mode():
        memory._largest_step(form, engine._model, device)
    for request in range(64):
        engine.apply(admit(request, **decoding))
    with Largest() as largest:
        engine.launch()
    assert 256 << 20 < largest.num_bytes <= planned.num_bytes < 1 << 30, largest.operator
