"""What every family must do beyond its golden cases: ranks that agree, kept weights, random ones."""

from collections.abc import Callable

import pytest
import torch
from safetensors import safe_open

from dlmserve import LLM, DecodingParams
from dlmserve.checkpoint import read_model_info
from dlmserve.messages import Admit, Decoding, Form, ModelSpec
from tests import thread_group
from tests.test_engine import tokens_of
from tests.test_shards import build, regroup, tensors

FAMILIES = ("llada_moe", "sdar", "llada2")
Folder = Callable[[str], str]


@pytest.mark.parametrize(
    ("family", "tp_degree"),
    [*((family, 2) for family in FAMILIES), *((family, 4) for family in ("llada", "dream", "llada2"))],
)
def test_ranks_unmask_together_what_one_does(family: str, tp_degree: int, golden_folder: Folder) -> None:
    info = read_model_info(golden_folder(f"{family}/model_B"))  # fewer KV heads than ranks
    model = ModelSpec(info.path, "auto", "float32", info.mask_id, list(info.eos_ids))
    form = Form("i", 0, 1, [], "", model, 256, 4, 64, 8, 10.0)
    decoding = Decoding(8, value=0.6, ignore_eos=True, block_causal=info.block_causal)
    commands = []
    for i, prompt in enumerate(([5, 9, 200, 31], [77] * 19)):
        end = len(prompt) + decoding.grid.num_masks(len(prompt), 16)
        canvas = prompt + [info.mask_id] * (end - len(prompt))
        commands.append(Admit(i, canvas, len(prompt), end, end, decoding))
    [wanted] = thread_group.decode(form, 1, commands)
    for results in thread_group.decode(form, tp_degree, commands):
        for command in commands:
            assert tokens_of(results, command.request) == tokens_of(wanted, command.request)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_regrouped_rank_reads_nothing_that_it_has(family: str, golden_folder: Folder) -> None:
    info = read_model_info(golden_folder(f"{family}/model_A"))
    old, fresh = build(0, 1, info=info), build(1, 2, info=info)
    new = regroup(old, 1, 2, info)
    assert new.num_bytes_read == 0
    found = tensors(new)
    for ask, tensor in tensors(fresh).items():
        assert torch.equal(found[ask], tensor), ask.name


@pytest.mark.parametrize("family", ["dream", *FAMILIES])
def test_a_model_runs_on_dummy_weights(family: str, golden_folder: Folder) -> None:
    llm = LLM(golden_folder(f"{family}/model_B"), load_format="dummy")
    (out,) = llm.generate([[1, 2, 3]], DecodingParams(gen_length=8, block_length=8, ignore_eos=True))
    assert len(out.token_ids) == 8


def test_what_chooses_experts_is_read_as_it_is_whatever_the_models_dtype(golden_folder: Folder) -> None:
    info = read_model_info(golden_folder("llada2/model_A"))
    read = {
        ask: tensor
        for ask, tensor in tensors(build(0, 1, dtype="bfloat16", info=info)).items()
        if ask.name.endswith("expert_bias")
    }
    assert read
    with safe_open(f"{info.path}/model.safetensors", framework="pt") as file:
        for ask, tensor in read.items():
            assert torch.equal(tensor, file.get_tensor(ask.name))
