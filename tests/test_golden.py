"""The engine reproduces the public reference code: logits, tokens, steps and confidences; TP 2 as TP 1."""

from collections.abc import Callable

import pytest
import torch

from dlmserve import LLM
from dlmserve.llm import Completion, Step
from tests import golden_data
from tests.golden_data import finals, prompts_of, run, run_blocks

BLOCK_CAUSAL = ("sdar", "llada2")
CASES = [
    pytest.param(family, file, i, id=f"{file}-{i}")
    for family, file in (
        ("llada", "public_llada"),
        ("llada", "public_llada_original"),
        ("dream", "public_dream"),
        ("llada_moe", "public_llada_moe"),
    )
    for i in range(len(golden_data.load(f"{family}/{file}.json")["traces"]))
]
LOGITS = [
    pytest.param(family, i, id=f"{family}-{i}")
    for family in ("llada", "dream", "llada_moe", *BLOCK_CAUSAL)
    for i in range(len(golden_data.load(f"{family}/public_{family}.json")["logits"]))
]
BLOCK_CASES = [
    pytest.param(family, i, id=f"{family}-{i}")
    for family in BLOCK_CAUSAL
    for i in range(len(golden_data.load(f"{family}/public_{family}.json")["traces"]))
]
# Short ones of each kind: cache modes, rules, both models (B has one KV head for all ranks), a batch.
TP2 = {"llada": (5, 18, 33, 44, 45), "dream": (2,)}


@pytest.mark.parametrize(("family", "index"), LOGITS)
def test_logits(family: str, index: int, golden_llm: Callable[..., LLM]) -> None:
    case = golden_data.load(f"{family}/public_{family}.json")["logits"][index]
    check_logits(golden_llm(f"{family}/model_{case['model']}"), case)


def check_logits(llm: LLM, case: dict) -> None:
    logits = llm.logits(case["ids"], case.get("block_length"))
    torch.testing.assert_close(logits[:, :8], torch.tensor(case["first8"]), atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(logits.logsumexp(-1), torch.tensor(case["logsumexp"]), atol=2e-3, rtol=1e-4)
    torch.testing.assert_close(logits.softmax(-1).amax(-1), torch.tensor(case["max_prob"]), atol=2e-4, rtol=0)
    assert logits.argmax(-1).tolist() == case["argmax"]


@pytest.mark.parametrize(("family", "file", "index"), CASES)
def test_trace(family: str, file: str, index: int, golden_llm: Callable[..., LLM]) -> None:
    case = golden_data.load(f"{family}/{file}.json")["traces"][index]
    check_trace(golden_llm(f"{family}/model_{case['model']}"), case)


def check_trace(llm: LLM, case: dict) -> None:
    completions = run(llm, case)
    if golden_data.is_capped(case):
        # The reference stops at its step cap; ours goes on until nothing is masked.
        assert golden_data.MASK_ID[case["model"]] not in completions[0].token_ids
        assert_same_start(completions[0], rows_of(case)[0])
        return
    for completion, (final, steps) in zip(
        completions, zip(finals(case), rows_of(case), strict=True), strict=True
    ):
        assert completion.token_ids == final
        assert len(completion.steps) == len(steps)
        for got, wanted in zip(completion.steps, steps, strict=True):
            assert_same_step(got, wanted)


@pytest.mark.parametrize(("family", "index"), BLOCK_CASES)
def test_block_causal_trace(family: str, index: int, golden_llm: Callable[..., LLM]) -> None:
    case = golden_data.load(f"{family}/public_{family}.json")["traces"][index]
    check_blocks(golden_llm(f"{family}/model_{case['model']}"), case)


@pytest.mark.parametrize("family", BLOCK_CAUSAL)
def test_a_block_causal_models_cache_is_exact(family: str, golden_llm: Callable[..., LLM]) -> None:
    case = golden_data.load(f"{family}/public_{family}.json")["traces"][0]
    check_blocks(golden_llm(f"{family}/model_{case['model']}"), case | {"mode": "none"})


def check_blocks(llm: LLM, case: dict) -> None:
    """Where the reference stops at an end token, after its block, ours goes on: compared as far as it came."""
    completion = run_blocks(llm, case)
    wanted = steps_of_blocks(case)
    for got, step in zip(completion.steps, wanted, strict=case["eos_id"] is None):
        assert_same_step(got, step)
    mask_id = golden_data.MASK_ID[case["model"]]
    final = [*case["final"], mask_id]
    final = final[: final.index(mask_id)]
    assert completion.token_ids[: len(final)] == final
    assert case["eos_id"] is None or case["eos_id"] in final


def steps_of_blocks(case: dict) -> list[Step]:
    """Its denoising passes; a block's first one is a recompute step, which also stores the block before it."""
    passes = [entry for entry in case["trace"] if entry["unmasked"]]
    blocks = [entry["unmasked"][0][0] // case["block_length"] for entry in passes]
    steps = []
    for i, entry in enumerate(passes):
        is_first = not i or blocks[i] != blocks[i - 1]
        kind = "recompute" if is_first or case.get("mode") == "none" else "cache"
        steps.append(Step(kind, [tuple(u) for u in entry["unmasked"]]))
    return steps


def test_two_ranks_give_the_same_tokens(golden_llm: Callable[..., LLM]) -> None:
    """More of them, and more families: tests/test_families.py."""
    for family, indices in TP2.items():
        traces = golden_data.load(f"{family}/public_{family}.json")["traces"]
        for index in indices:
            case = traces[index]
            completions = run(golden_llm(f"{family}/model_{case['model']}", 2), case)
            assert [c.token_ids for c in completions] == finals(case), f"{family} trace {index}"
            assert [len(c.steps) for c in completions] == [len(steps) for steps in rows_of(case)]


def rows_of(case: dict) -> list[list[Step]]:
    """Each request's own steps: a batch's reference goes on until all rows are done, ours do not wait."""
    prompts = prompts_of(case)
    padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]  # left padded there, not here
    rows: list[list[Step]] = [[] for _ in prompts]
    for entry in case["trace"]:
        kind = "recompute" if entry.get("kind", "full") == "full" else "cache"
        unmasked = entry["unmasked"] if case["batch"] > 1 else [[0, *u] for u in entry["unmasked"]]
        for row, steps in enumerate(rows):
            mine = [(u[1] - padding[row], u[2], u[3]) for u in unmasked if u[0] == row]
            if mine:
                steps.append(Step(kind, mine))
    return rows


def assert_same_step(got: Step, wanted: Step) -> None:
    assert got.kind == wanted.kind
    mine, theirs = sorted(got.unmasked), sorted(wanted.unmasked)
    assert [u[:2] for u in mine] == [u[:2] for u in theirs]
    assert [u[2] for u in mine] == pytest.approx([u[2] for u in theirs], abs=2e-4)


def assert_same_start(got: Completion, wanted: list[Step]) -> None:
    """Equal as long as the reference is within its cap: its first block."""
    capped = next(i for i, step in enumerate(wanted) if i and step.kind == "recompute")
    for mine, theirs in zip(got.steps[:capped], wanted[:capped], strict=True):
        assert_same_step(mine, theirs)
