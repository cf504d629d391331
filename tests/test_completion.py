"""From unmasked columns to an answer: any order of tokens, any split of characters and stops, any reader."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.policy.request import StepUpdate
from dlmserve.errors import NotFinite, QueueFull
from dlmserve.server.completion import Completion, Generation, Piece
from dlmserve.server.schema import parse_request
from dlmserve.server.specs import Run, encode_request, plan_runs
from dlmserve.server.text import AnswerText, StopMatcher
from dlmserve.tokenizer import Tokenizer
from tests.fake_head import EOS, FakeHead, as_step, scripted

INFO = read_model_info(resolve("tiny"), "tiny")
TOKENIZER = Tokenizer(INFO.path)
FEW_LETTERS = st.text("abc\u20ac\U0001f600", max_size=12)
STOPS = st.lists(st.text("abc\u20ac", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str]) -> str:
    """The specification: the text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def split(items: list, sizes: list[int]) -> list[list]:
    """`items` in runs of the given sizes, the last size again and again."""
    rest, runs = list(items), []
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1] if sizes else 1)):
        if not rest:
            return runs
        runs.append(rest[:size])
        rest = rest[size:]
    return runs


SIZES = st.lists(st.integers(1, 5), max_size=6)


# ---- text


@given(FEW_LETTERS, STOPS, SIZES)
def test_released_text_ends_before_the_first_complete_stop_string(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stops)
    released = "".join(matcher.push("".join(part)) for part in split(list(text), sizes)) + matcher.flush()
    assert released == cut(text, stops)
    assert matcher.stopped == (released != text)


@given(FEW_LETTERS, STOPS)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, released = StopMatcher(stops), ""
    for end, letter in enumerate(text, start=1):
        released += matcher.push(letter)
        if matcher.stopped:
            break
        held = text[len(released) : end]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@given(st.lists(st.integers(6, INFO.vocab_size - 1) | st.just(EOS), max_size=30))
def test_any_tokens_give_the_text_of_the_whole(tokens: list[int]) -> None:
    text = AnswerText(TOKENIZER, [])
    parts = [text.push(token) for token in tokens]
    assert "".join([*parts, text.finish()]) == TOKENIZER.decode(tokens)
    assert text.num_tokens == len(tokens)


@given(FEW_LETTERS, STOPS)
def test_the_tokens_of_a_cut_text_are_those_that_it_needs(string: str, stops: list[str]) -> None:
    text, tokens = AnswerText(TOKENIZER, stops), TOKENIZER.encode(string)
    released = "".join([*(text.push(token) for token in tokens), text.finish()])
    assert released == cut(string, stops)
    assert TOKENIZER.decode(tokens[: text.num_tokens]).startswith(released)
    assert not released or not TOKENIZER.decode(tokens[: text.num_tokens - 1]).startswith(released)


def test_a_stop_string_that_only_began_is_released_at_the_end() -> None:
    text = AnswerText(TOKENIZER, ["xyz"])
    assert [text.push(token) for token in TOKENIZER.encode("axy")] == ["a", "", ""]
    assert text.finish() == "xy"
    assert not text.stopped


# ---- completions


def make_run(tokens: int, block_length: int = 8, **fields: object) -> Run:
    body = {"prompt": "hi", "max_tokens": tokens, "block_length": block_length, **fields}
    request = parse_request("text", body)
    [run] = plan_runs(
        request, encode_request(request, TOKENIZER, INFO, 512), "r", INFO, ServerConfig(), lambda: 0
    )
    return run


def decode(
    head: FakeHead, run: Run, stops: list[str], take_after: list[int], unmask: bool = True
) -> list[Piece]:
    """Drives a completion to its end; the client takes a piece after every so many steps."""
    completion = Completion(run, TOKENIZER, INFO.eos_ids, stops, unmask, lambda: None)
    completion.start(head)
    pieces = []
    waits = itertools.cycle(take_after or [1])
    while not completion.done:
        for _ in range(next(waits)):
            if not completion.done:
                head.step(1)
        pieces.append(completion.take())
    assert completion.take() is None
    return [piece for piece in pieces if piece]


@given(
    st.text("ab\u20ac\U0001f600", max_size=25),
    STOPS,
    st.integers(0, 99),
    st.integers(1, 5),
    st.lists(st.integers(1, 9), max_size=5),
)
def test_pieces_add_up_to_the_answer_whatever_the_order_of_tokens(
    string: str, stops: list[str], order: int, per_step: int, take_after: list[int]
) -> None:
    tokens = TOKENIZER.encode(string)[:24]
    head = FakeHead(scripted(tokens, per_step, shuffle=order), paused=True)
    pieces = decode(head, make_run(24), stops, take_after)
    text = "".join(piece.text for piece in pieces)
    whole = TOKENIZER.decode(tokens)
    assert text == cut(whole, stops)
    reason = "stop" if text != whole or len(tokens) < 24 else "length"
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [reason]
    given_tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.unmasked.token for token in given_tokens] == tokens[: len(given_tokens)]
    assert len(given_tokens) == len(tokens) or text != whole
    columns = [unmasked.position for piece in pieces for unmasked in piece.unmasked]
    assert len(set(columns)) == len(columns)
    prefixes = [piece.final_prefix for piece in pieces]
    assert prefixes == sorted(prefixes)


def test_text_waits_for_the_gap_before_it() -> None:
    run = make_run(4, block_length=4)
    head = FakeHead(lambda spec: [], paused=True)
    completion = Completion(run, TOKENIZER, INFO.eos_ids, [], True, lambda: None)
    completion.start(head)
    columns = scripted(TOKENIZER.encode("0123"), 4)(run.spec)[0]
    seen = []
    for i in (1, 3, 0, 2):
        completion.on_step(StepUpdate(1, as_step(0, 0, run.spec, [columns[i]])))
        piece = completion.take()
        assert piece is not None
        seen.append((piece.text, piece.final_prefix))
    assert seen == [("", 0), ("", 0), ("01", 2), ("23", 4)]


def test_a_stop_string_cancels_the_decoding_at_once() -> None:
    head = FakeHead(scripted(TOKENIZER.encode("say xy and more")), paused=True)
    pieces = decode(head, make_run(64), ["xy"], [1])
    assert "".join(piece.text for piece in pieces) == "say "
    assert pieces[-1].finish_reason == "stop"
    assert head.cancelled == [(1, "stop")] and not head.running


def test_a_stop_string_in_the_step_that_ends_the_request_is_one_end() -> None:
    head = FakeHead(scripted(TOKENIZER.encode("axy"), per_step=8), paused=True)
    pieces = decode(head, make_run(8), ["xy"], [1])
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("a", "stop")]


def test_a_stop_string_that_only_the_end_completes_is_an_end_too() -> None:
    head = FakeHead(scripted(TOKENIZER.encode("\U0001f600")), paused=True)  # its first bytes only
    pieces = decode(head, make_run(1), ["\ufffd"], [1])
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("", "stop")]


def test_the_answer_never_exceeds_what_was_asked() -> None:
    head = FakeHead(scripted(TOKENIZER.encode("0123456789"), per_step=8), paused=True)
    [piece] = decode(head, make_run(3), [], [1])
    assert (piece.text, piece.finish_reason, len(piece.tokens)) == ("012", "length", 3)


def test_an_eos_is_an_ordinary_token_where_the_client_says_so() -> None:
    tokens = [*TOKENIZER.encode("a"), EOS, *TOKENIZER.encode("b")]
    run = make_run(3, block_length=3, ignore_eos=True)
    [piece] = decode(FakeHead(scripted(tokens, per_step=3), paused=True), run, [], [1])
    assert (piece.text, piece.finish_reason, len(piece.tokens)) == ("ab", "length", 3)


def test_a_plain_client_is_not_woken_with_nothing_to_see() -> None:
    tokens = TOKENIZER.encode("\U0001f600")  # several tokens, one character
    assert len(tokens) > 1
    pieces = decode(FakeHead(scripted(tokens), paused=True), make_run(8), [], [1], unmask=False)
    assert [(piece.text, piece.unmasked) for piece in pieces] == [("\U0001f600", []), ("", [])]


# ---- generations


def make_generation(head: FakeHead, runs: int) -> Generation:
    generation = Generation(head)
    for _ in range(runs):
        generation.add(make_run(8), TOKENIZER, INFO.eos_ids, [], False)
    return generation


def test_a_generation_that_cannot_start_leaves_nothing_running() -> None:
    async def story() -> None:
        head = FakeHead(scripted([]), paused=True)
        head.refuse, head.refuse_after = QueueFull("full"), 2
        with pytest.raises(QueueFull), make_generation(head, 3):
            pass
        assert head.cancelled == [(1, "abandoned"), (2, "abandoned")]

    asyncio.run(story())


def test_leaving_a_generation_cancels_what_still_runs() -> None:
    async def story() -> None:
        head = FakeHead(scripted([]), paused=True)
        with make_generation(head, 2):
            head.step(1)  # finds an EOS
        assert head.cancelled == [(2, "abandoned")]

    asyncio.run(story())


def test_the_first_error_of_any_choice_ends_the_wait() -> None:
    async def story() -> None:
        head = FakeHead(scripted(TOKENIZER.encode("abc")), paused=True)
        head.fail_at = {(2, 1): NotFinite("nan")}
        with make_generation(head, 2) as generation:
            head.step(2)
            with pytest.raises(NotFinite):
                await generation.finished()
        assert head.cancelled == [(1, "abandoned")]

    asyncio.run(story())
