"""LLM: offline generation, its parameters and what is wrong with them."""

import pytest

from dlmserve import LLM, DecodingParams
from dlmserve.errors import ConfigError, ContextTooLong, RequestError

# Tasks that the embedded model always gets right.
PROMPTS = ["Write as a JSON list: Anna Oslo", "Reverse the order of the words: moon river gold"]
ANSWERS = ['["Anna", "Oslo"]', "gold river moon"]


def chat(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


def test_completions_come_in_the_prompts_order_with_their_steps(tiny: LLM) -> None:
    out = tiny.generate([chat(tiny, p) for p in PROMPTS], DecodingParams(gen_length=64, block_length=32))
    assert [c.text for c in out] == ANSWERS
    for completion, prompt in zip(out, PROMPTS, strict=True):
        start = len(chat(tiny, prompt))
        columns = [position for step in completion.steps for position, _, _ in step.unmasked]
        assert len(columns) == len(set(columns)) and min(columns) == start
        assert completion.steps[0].kind == "recompute"
        assert all(step.unmasked for step in completion.steps), "every step unmasks something"


def test_more_prompts_than_seats_are_all_answered() -> None:
    llm = LLM("tiny", max_num_seqs=2)
    out = llm.generate([chat(llm, p) for p in PROMPTS * 3], DecodingParams(gen_length=32, block_length=32))
    assert [c.text for c in out] == ANSWERS * 3


def test_a_string_alone_is_one_prompt(tiny: LLM) -> None:
    (out,) = tiny.generate("2+3=", DecodingParams(gen_length=16, block_length=8, ignore_eos=True))
    assert len(out.token_ids) == 16


def test_a_length_within_a_block_is_not_exceeded(tiny: LLM) -> None:
    (out,) = tiny.generate([[7, 8]], DecodingParams(gen_length=33, block_length=32, ignore_eos=True))
    assert len(out.token_ids) == 33 and out.finish_reason == "length"


def test_steps_are_bounded_where_no_token_passes_the_threshold(tiny: LLM) -> None:
    params = DecodingParams(gen_length=64, block_length=32, threshold=1.5, max_steps=14, ignore_eos=True)
    (out,) = tiny.generate([[7, 8]], params)
    assert [len(step.unmasked) for step in out.steps] == [5, 5, 5, 5, 4, 4, 4] * 2


def test_a_stop_string_cuts_text_and_tokens(tiny: LLM) -> None:
    (out,) = tiny.generate([chat(tiny, PROMPTS[1])], DecodingParams(gen_length=32, stop="ver mo"))
    assert (out.text, out.finish_reason) == ("gold ri", "stop")
    assert tiny.tokenizer is not None and tiny.tokenizer.decode(out.token_ids).startswith("gold ri")


def test_steps_are_seen_as_they_happen(tiny: LLM) -> None:
    seen: list[int] = []
    tiny.generate(
        [[7, 8], [9]], DecodingParams(gen_length=16, ignore_eos=True), on_step=lambda i, step: seen.append(i)
    )
    assert set(seen) == {0, 1}


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "no tokens"),
        ([5], {}, "holds the mask token 5"),
        ([99999], {}, r"99999 is outside 0\.\.1087"),
        ([7], {"gen_length": 0}, "wanted at least 1"),
        ([7], {"threshold": 0.9, "factor": 1.0}, "threshold and factor are given"),
        ([7], {"threshold": 0.0}, "threshold is 0.0; wanted a positive number"),
        ([7], {"gen_length": 64, "block_length": 32, "steps": 3}, "multiple of the 2 blocks"),
        ([7], {"gen_length": 64, "block_length": 32, "max_steps": 3}, "max_steps is 3; .* of the 2 blocks"),
        ([7], {"gen_length": 8, "block_length": 8, "factor": 1.0, "max_steps": 8}, "it bounds a threshold"),
        ([7], {"refresh": "often"}, "wanted 'full' or 'response:K'"),
    ],
)
def test_what_is_wrong_is_named(prompt: list[int], params: dict, words: str, tiny: LLM) -> None:
    with pytest.raises((RequestError, ConfigError), match=words):
        tiny.generate([prompt], DecodingParams(**params))


def test_a_canvas_beyond_the_context_is_refused(tiny: LLM) -> None:
    with pytest.raises(ContextTooLong, match="prompt of 2 tokens . canvas of 512 exceeds the context of 512"):
        tiny.generate([[7, 8]], DecodingParams(gen_length=490, block_length=32))


def test_an_unusable_device_or_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        LLM("tiny", device="tpu")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        LLM("tiny", dtype="int8")
