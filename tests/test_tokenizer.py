"""Text and tokens: what users type is never a special token; text comes out append-only."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.checkpoint import resolve
from dlmserve.errors import CheckpointError, RequestError
from dlmserve.tokenizer import Detokenizer, Tokenizer

TINY = Tokenizer(resolve("tiny"))
SPECIAL = ("<|mdm_mask|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>")
texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPECIAL)), max_size=4).map("".join)


@given(texts)
def test_plain_text_round_trips_and_holds_no_special_token(text: str) -> None:
    ids = TINY.encode(text)
    assert all(token > 5 for token in ids)
    assert TINY.decode(ids) == text


@given(texts)
def test_a_chat_has_the_templates_special_tokens_and_no_others(text: str) -> None:
    ids = TINY.encode_chat([{"role": "user", "content": text}])
    assert [token for token in ids if token <= 5] == [1, 2, 3, 4, 2, 3]


def test_the_chat_template_is_the_checkpoints() -> None:
    ids = TINY.encode_chat(
        [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "2+3?"}]
    )
    assert "".join(map(TINY.token_text, ids)) == (
        "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+3?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_an_empty_prompt_is_the_start_token() -> None:
    assert TINY.encode_prompt("") == [1]
    assert TINY.encode_prompt("2+3=") == TINY.encode("2+3=")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer(str(tmp_path))


def test_a_template_that_refuses_is_the_requests_fault() -> None:
    class Refusing(Tokenizer):
        def __init__(self) -> None:
            super().__init__(resolve("tiny"))
            from dlmserve.tokenizer import _raise

            self._template = type(
                "T", (), {"render": staticmethod(lambda **_: _raise("roles must alternate"))}
            )()

    with pytest.raises(RequestError, match="roles must alternate"):
        Refusing().encode_chat([{"role": "user", "content": "x"}])


@given(st.lists(st.integers(6, 1079) | st.integers(6, 261), max_size=60), st.data())
def test_growing_text_is_append_only_and_adds_up(ids: list[int], data: st.DataObject) -> None:
    detokenizer, out, at = Detokenizer(TINY), "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        out += detokenizer.push(ids[at : at + size])
        assert TINY.decode(ids).startswith(out), "nothing that was given out changes"
        at += size
    assert out + detokenizer.flush() == TINY.decode(ids)


def test_bytes_that_never_make_a_character_are_not_held_back_for_good() -> None:
    broken = TINY.encode("中")[0]  # a first byte, again and again
    detokenizer, held = Detokenizer(TINY), []
    for count in range(1, 60):
        detokenizer.push([broken])
        held.append(count - detokenizer._stable_end)
    assert max(held) < 20


def test_a_tokens_bytes_are_its_own_even_where_it_is_half_a_character() -> None:
    ids = TINY.encode("中a é")
    assert bytes(b for token in ids for b in TINY.token_bytes(token)).decode() == "中a é"
    assert bytes(TINY.token_bytes(0)).decode() == "<|endoftext|>"


def test_a_character_that_spans_tokens_is_held_back_until_complete() -> None:
    ids = TINY.encode("中a")
    assert len(ids) == 4
    detokenizer = Detokenizer(TINY)
    assert [detokenizer.push([token]) for token in ids] == ["", "", "中", "a"]
    detokenizer.push(ids[:2])
    assert detokenizer.flush() == "\ufffd"
