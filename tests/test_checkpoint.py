"""Model folders: what is read, what is refused and in which words."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlmserve import LLM
from dlmserve.checkpoint import ALIASES, read_model_info, resolve
from dlmserve.errors import CheckpointError, ConfigError, UnsupportedModel
from dlmserve.worker.weights import Ask, DummyWeights, SafetensorsWeights
from tests.golden_data import load

Folder = Callable[[str], str]


def edited(source: str, target: Path, **changes: object) -> str:
    """A copy of a model folder with other config values (None: the key is dropped)."""
    target.mkdir()
    config = json.loads((Path(source) / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (target / "model.safetensors").symlink_to(Path(source) / "model.safetensors")
    return str(target)


def test_the_embedded_model_is_found_by_its_alias() -> None:
    info = read_model_info(resolve("tiny"), "tiny")
    assert (info.family, info.mask_id, info.max_model_len, info.bos_id) == ("llada", 5, 512, 1)
    assert info.eos_ids == (0, 4), "the fill token and the turn's end"
    assert Path(ALIASES["tiny"]).is_dir()


def test_an_unknown_name_lists_the_aliases() -> None:
    with pytest.raises(CheckpointError, match="no alias; aliases: tiny, llada-8b"):
        resolve("llada-9b")


def test_a_folder_that_is_no_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model_info(str(tmp_path))


def test_an_unsupported_architecture_names_those_that_are(golden_folder: Folder, tmp_path: Path) -> None:
    folder = edited(golden_folder("llada/model_A"), tmp_path / "m", architectures=["LLaDAUltraLM"])
    with pytest.raises(UnsupportedModel, match=r"LLaDAUltraLM.*supported: LLaDAModelLM, DreamModel"):
        read_model_info(folder)


def test_families_are_told_apart_by_their_architecture(golden_folder: Folder) -> None:
    folders = [golden_folder(f"{family}/model_A") for family in ("llada", "llada_moe")]
    configs = [json.loads((Path(folder) / "config.json").read_text()) for folder in folders]
    assert [config["model_type"] for config in configs] == ["llada", "llada"]
    assert [read_model_info(folder).family for folder in folders] == ["llada", "llada_moe"]


def test_a_block_causal_models_blocks_are_those_it_was_trained_with(golden_folder: Folder) -> None:
    infos = [read_model_info(golden_folder(f"{family}/model_A")) for family in ("sdar", "llada2", "dream")]
    assert [info.block_causal for info in infos] == [True, True, False]
    assert [info.default_block_length for info in infos] == [4, 32, 32]


def test_a_mask_token_that_no_config_names_is_the_familys(golden_folder: Folder, tmp_path: Path) -> None:
    changes = {"mask_token_id": None, "vocab_size": 157184}
    folder = edited(golden_folder("llada_moe/model_A"), tmp_path / "real", **changes)
    assert read_model_info(folder).mask_id == 156895
    small = edited(golden_folder("llada_moe/model_A"), tmp_path / "small", mask_token_id=None)
    with pytest.raises(CheckpointError, match="no mask_token_id.*156895.*beyond its 320 tokens"):
        read_model_info(small)


def test_a_model_without_a_mask_token_is_refused(golden_folder: Folder, tmp_path: Path) -> None:
    folder = edited(golden_folder("llada/model_A"), tmp_path / "m", mask_token_id=None)
    with pytest.raises(CheckpointError, match="no mask_token_id"):
        read_model_info(folder)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ("llada/model_A", {"alibi": True}, "alibi=True; LLaDA is served with alibi=False"),
        ("llada/model_A", {"mlp_hidden_size": 96}, r"has shape \(160, 64\); config.json implies \(96, 64\)"),
        ("llada/model_A", {"n_layers": 4}, "no tensor model.transformer.blocks.3"),
        ("dream/model_A", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llada_moe/model_A", {"norm_topk_prob": True}, "LLaDA-MoE is served with norm_topk_prob=False"),
        ("llada_moe/model_A", {"clip_qkv": 8.0}, "clip_qkv=8.0; LLaDA-MoE is served with clip_qkv=None"),
        ("llada_moe/model_A", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64"),
        ("sdar/model_A", {"use_sliding_window": True}, "SDAR is served with use_sliding_window=False"),
        ("llada2/model_A", {"score_function": "softmax"}, "LLaDA 2 is served with score_function='sigmoid'"),
        (
            "llada2/model_A",
            {"use_qk_norm": False},
            "use_qk_norm=False; LLaDA 2 is served with use_qk_norm=True",
        ),
        ("llada_moe/model_A", {"moe_layer_freq": [1, 1]}, r"moe_layer_freq=\[1, 1\]; .* its 3 layers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    model: str, changes: dict, words: str, golden_folder: Folder, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        LLM(edited(golden_folder(model), tmp_path / "m", **changes))


def test_a_tp_degree_that_does_not_divide_the_heads_is_refused(golden_folder: Folder, tmp_path: Path) -> None:
    folder = edited(golden_folder("llada/model_A"), tmp_path / "m", n_heads=1, n_kv_heads=1)
    with pytest.raises(ConfigError, match="TP degree 2 does not divide the model's 1 attention heads"):
        from dlmserve.worker.models import read_config
        from dlmserve.worker.models.config import shard_of

        shard_of(read_config(read_model_info(folder)), 0, 2)


def test_pickled_weights_are_not_opened(golden_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(load("llada/model_A.json")["config"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="pickled weights are not loaded"):
        LLM(str(tmp_path))


def test_sharded_files_are_read_through_their_index(golden_folder: Folder, tmp_path: Path) -> None:
    source = golden_folder("dream/model_A")
    tensors = load_file(f"{source}/model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((Path(source) / "config.json").read_text())
    ids = [5, 9, 200, 318, 318]
    assert torch.equal(LLM(str(tmp_path)).logits(ids), LLM(source).logits(ids))


def test_a_broken_file_is_named(golden_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(golden_folder("llada/model_A")) / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no readable safetensors file"):
        LLM(str(tmp_path))


def test_a_rank_reads_its_slices_only(golden_folder: Folder) -> None:
    weights = SafetensorsWeights(golden_folder("llada/model_A"), torch.float32, "cpu")
    name, shape = "model.transformer.blocks.0.attn_out.weight", (64, 64)
    full = weights.get(Ask(name, shape))
    assert torch.equal(weights.get(Ask(name, shape, 0, 16, 32)), full[16:32])
    assert torch.equal(weights.get(Ask(name, shape, 1, 48, 64)), full[:, 48:])


def test_dummy_weights_are_the_same_for_every_slicing(golden_folder: Folder) -> None:
    weights = DummyWeights(torch.float32, "cpu")
    full = weights.get(Ask("a.weight", (8, 6)))
    assert torch.equal(torch.cat([weights.get(Ask("a.weight", (8, 6), 0, s, s + 4)) for s in (0, 4)]), full)
    assert not torch.equal(weights.get(Ask("b.weight", (8, 6))), full)
