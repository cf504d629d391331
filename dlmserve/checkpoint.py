"""Finds a model folder and reads what both sides must know of it: ids, lengths, defaults.

Head and ranks both use it, so no torch here and no weights. Weights are `worker/weights.py`'s.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from dlmserve.errors import CheckpointError, UnsupportedModel

ALIASES = {
    "tiny": str(Path(__file__).parent / "checkpoints" / "tiny"),
    "llada-8b": "GSAI-ML/LLaDA-8B-Instruct",
    "llada-8b-instruct": "GSAI-ML/LLaDA-8B-Instruct",
    "llada-8b-base": "GSAI-ML/LLaDA-8B-Base",
    "llada-1.5": "GSAI-ML/LLaDA-1.5",
    "dream-7b": "Dream-org/Dream-v0-Instruct-7B",
    "dream-7b-instruct": "Dream-org/Dream-v0-Instruct-7B",
    "dream-7b-base": "Dream-org/Dream-v0-Base-7B",
    "llada-moe": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
    "llada-moe-instruct": "inclusionAI/LLaDA-MoE-7B-A1B-Instruct",
    "llada-moe-base": "inclusionAI/LLaDA-MoE-7B-A1B-Base",
    "sdar-1.7b": "JetLM/SDAR-1.7B-Chat",
    "sdar-4b": "JetLM/SDAR-4B-Chat",
    "sdar-8b": "JetLM/SDAR-8B-Chat",
    "llada2-mini": "inclusionAI/LLaDA2.0-mini",
    "llada2-flash": "inclusionAI/LLaDA2.0-flash",
}
ARCHITECTURES = {
    "LLaDAModelLM": "llada",
    "DreamModel": "dream",
    "LLaDAMoEModelLM": "llada_moe",
    "SDARForCausalLM": "sdar",
    "LLaDA2MoeModelLM": "llada2",
}
# Families whose attention is block-causal, and the blocks they were trained with where config.json has no block_size.
BLOCK_CAUSAL = {"sdar": 4, "llada2": 32}
# Of families whose config.json does not name it.
MASK_IDS = {"llada_moe": 156895, "llada2": 156895}
# config.json of LLaDA and Dream name the fill token as EOS; a chat answer ends with the turn's own end token.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096  # of each weight file, for its fingerprint


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a checkpoint without its weights."""

    path: str
    name: str  # what the user called it
    family: str  # a file of worker/models/
    mask_id: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    vocab_size: int
    max_model_len: int  # tokens of prompt + canvas
    num_heads: int
    generation: dict = field(default_factory=dict)  # generation_config.json: gen_length, block_length, ...
    block_causal: bool = False  # a position sees its block and earlier ones only
    trained_block_length: int | None = None

    @property
    def default_gen_length(self) -> int:
        return self.generation.get("gen_length") or 128

    @property
    def default_block_length(self) -> int:
        return self.generation.get("block_length") or self.trained_block_length or 32


def resolve(model: str) -> str:
    """The local folder of an alias, a folder or a Hub id; the last is downloaded (with a progress bar).

    Raises CheckpointError where there is none.
    """
    target = ALIASES.get(model, model)
    if Path(target).is_dir():
        return str(Path(target).resolve())
    if target.count("/") != 1 or target.startswith((".", "/", "~")):
        known = ", ".join(ALIASES)
        raise CheckpointError(
            f"model '{model}' is no folder, no Hugging Face id (owner/name) and no alias; aliases: {known}"
        )
    return _download(model, target)


def _download(model: str, repo_id: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt", "*.model"]
    try:
        return snapshot_download(repo_id, allow_patterns=wanted)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model '{model}' ({repo_id}) could not be had from the Hugging Face Hub: {error}. "
            "Give a local folder, or check the network, the name and your access token (HF_TOKEN)."
        ) from error


def fingerprint(folder: str, with_weights: bool) -> str:
    """Tells copies of a checkpoint from other checkpoints: config.json, and of each weight file its size, header
    and samples from end to end. Not a proof against someone who wants to deceive: that would read every byte."""
    digest = hashlib.sha256()
    paths = [
        Path(folder) / "config.json",
        *sorted(Path(folder).glob("*.safetensors") if with_weights else []),
    ]
    for path in filter(Path.is_file, paths):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else size
            file.seek(0)
            digest.update(file.read(min(header_bytes + 8, size)))
            for i in range(NUM_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def find_copy(path: str, name: str, wanted: str, with_weights: bool, override: str | None) -> str:
    """This node's folder of the head's checkpoint: `override`, or the head's own `path` where it exists here, or
    what `name` (alias, Hub id) leads to. Raises CheckpointError for none, or one with another fingerprint."""
    folder = override or (path if Path(path).is_dir() else resolve(name or path))
    found = fingerprint(folder, with_weights)
    if wanted and found != wanted:
        raise CheckpointError(
            f"the checkpoint at {folder} is not the head's (fingerprint {found[:12]}, wanted {wanted[:12]}); "
            "copy the head's, or point `dlmserve join --model` to it"
        )
    return folder


def read_json(folder: str, name: str, required: bool = False) -> dict:
    """A JSON file of the model folder; {} where an optional one is missing."""
    path = Path(folder) / name
    if not path.exists():
        if required:
            raise CheckpointError(f"{path} is missing: '{folder}' is not a Hugging Face model folder")
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def read_model_info(folder: str, name: str | None = None) -> ModelInfo:
    """Raises UnsupportedModel for an architecture without a model file, CheckpointError for a broken folder."""
    config = read_json(folder, "config.json", required=True)
    generation = read_json(folder, "generation_config.json")
    family = _family(config, folder)
    llada = family == "llada"
    vocab_size = config.get("embedding_size") or config["vocab_size"] if llada else config["vocab_size"]
    mask_id = _first(config.get("mask_token_id"), generation.get("mask_token_id"), MASK_IDS.get(family))
    if mask_id is None or not 0 <= mask_id < vocab_size:
        raise CheckpointError(
            f"{folder}/config.json has no mask_token_id: a diffusion language model needs one"
            + (f", and {mask_id}, that of its family, is beyond its {vocab_size} tokens" if mask_id else "")
        )
    return ModelInfo(
        path=folder,
        name=name or os.path.basename(folder.rstrip("/")),
        family=family,
        mask_id=mask_id,
        eos_ids=_eos_ids(config, generation, folder),
        bos_id=_first(config.get("bos_token_id"), generation.get("bos_token_id")),
        vocab_size=vocab_size,
        max_model_len=config["max_sequence_length"] if llada else config["max_position_embeddings"],
        num_heads=config["n_heads"] if llada else config["num_attention_heads"],
        generation=generation,
        block_causal=family in BLOCK_CAUSAL,
        trained_block_length=config.get("block_size", BLOCK_CAUSAL[family])
        if family in BLOCK_CAUSAL
        else None,
    )


def _family(config: dict, folder: str) -> str:
    # LLaDA-MoE says model_type "llada" too: only `architectures` tells them apart.
    for architecture in config.get("architectures") or []:
        if architecture in ARCHITECTURES:
            return ARCHITECTURES[architecture]
    raise UnsupportedModel(
        f"{folder}/config.json has architectures {config.get('architectures')} "
        f"(model_type {config.get('model_type')!r}); supported: {', '.join(ARCHITECTURES)}"
    )


def _eos_ids(config: dict, generation: dict, folder: str) -> tuple[int, ...]:
    ids = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    added = read_json(folder, "tokenizer.json").get("added_tokens", [])
    ids.update(token["id"] for token in added if token["content"] in TURN_ENDS)
    return tuple(sorted(ids))


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
