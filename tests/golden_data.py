"""The golden checkpoints and cases: what the public reference code of each family computes.

Weights follow the recipe of the cases: names in sorted order, one RandomState(seed), standard_normal(shape) times a
scale by name suffix (norms: 1 + 0.1 z), float32; last, the head's row of the mask token is zeroed.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from dlmserve import LLM, DecodingParams
from dlmserve.grid import Grid
from dlmserve.llm import Completion
from tests.golden_shapes import SHAPES

FOLDER = Path(__file__).parent / "golden"
MASK_ID = {"A": 318, "B": 380}
NORM_SUFFIXES = ("norm.weight", "layernorm.weight", "ln_f.weight")


def load(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def write_checkpoint(name: str, folder: Path) -> Path:
    """config.json and model.safetensors of e.g. "llada/model_A"."""
    spec = load(f"{name}.json")
    shapes, head = SHAPES[spec["arch"]](spec["config"])
    random = np.random.RandomState(spec["seed"])
    tensors = {}
    for tensor in sorted(shapes):
        z = random.standard_normal(shapes[tensor])
        weight = 1.0 + 0.1 * z if tensor.endswith(NORM_SUFFIXES) else _scale(tensor, spec["scales"]) * z
        tensors[tensor] = weight.astype(np.float32)
    tensors[head][spec["mask_token_id"]] = 0.0
    folder.mkdir(parents=True)
    config = {"mask_token_id": spec["mask_token_id"], **spec["config"]}  # some families' config has none
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _scale(tensor: str, scales: dict[str, float]) -> float:
    return scales[max((suffix for suffix in scales if tensor.endswith(suffix)), key=len)]


def run(llm: LLM, case: dict) -> list[Completion]:
    """Decodes the case's prompts as its reference did."""
    params = DecodingParams(
        gen_length=case["gen_length"],
        block_length=case["block_length"],
        cache=case.get("mode", "none"),
        ignore_eos=True,
        **rule_of(case),
    )
    return llm.generate(prompts_of(case), params)


def run_blocks(llm: LLM, case: dict) -> Completion:
    """A case of a block-causal model: whole blocks, on and on past what its reference takes for an end."""
    block_length = case["block_length"]
    length = Grid(block_length, True).num_masks(len(case["prompt"]), case["gen_length"])
    steps = case["steps_per_block"] * -(-length // block_length)
    rule = {"steps": steps}
    if case["threshold"] is not None:
        rule = {"threshold": case["threshold"], "max_steps": steps}
    params = DecodingParams(length, block_length, ignore_eos=True, cache=case.get("mode"), **rule)
    [completion] = llm.generate([case["prompt"]], params)
    return completion


def rule_of(case: dict) -> dict[str, float]:
    if case.get("factor") is not None:
        return {"factor": case["factor"]}
    if case.get("threshold") is not None:
        return {"threshold": case["threshold"]}
    return {"steps": case["steps"]}


def prompts_of(case: dict) -> list[list[int]]:
    if "prompts" in case:
        return case["prompts"]
    return case["prompt"] if case["batch"] > 1 else [case["prompt"]]


def finals(case: dict) -> list[list[int]]:
    return case["final"] if isinstance(case["final"][0], list) else [case["final"]]


def is_capped(case: dict) -> bool:
    """The reference stopped at its step cap, with masks left."""
    return MASK_ID[case["model"]] in finals(case)[0]
