"""Block-causal models on the host: the grid of blocks, spans whose cache stays exact, the head's books of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import pages_needed
from dlmserve.control.policy.remaining import RemainingWork
from dlmserve.control.policy.request import RequestSpec, RequestState
from dlmserve.errors import RequestError
from dlmserve.grid import Grid
from dlmserve.messages import Admit, Decoding, RequestStep
from dlmserve.server.schema import parse_request
from dlmserve.server.specs import encode_request, plan_runs
from dlmserve.tokenizer import Tokenizer
from dlmserve.worker.batch import Span
from dlmserve.worker.canvas import Resident
from tests.test_canvas import unmask

MASK = 99


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 9))
def test_the_grid_of_a_block_causal_model_counts_from_column_0(start: int, length: int, block: int) -> None:
    grid = Grid(block, block_causal=True)
    end = start + grid.num_masks(start, length)
    assert grid.start(start) == start // block * block
    assert end % block == 0 and 0 <= end - (start + length) < block
    columns = range(start, start + length)
    assert grid.num_blocks(start, length) == len({column // block for column in columns})
    most = grid.most_masks(start, length)
    assert (not most or (start + most) % block == 0) and 0 <= length - most < block
    assert grid.most_masks(start, grid.num_masks(start, length)) == grid.num_masks(start, length)


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 9))
def test_otherwise_it_counts_from_the_first_output_position(start: int, length: int, block: int) -> None:
    grid = Grid(block, block_causal=False)
    assert grid.start(start) == start
    assert grid.num_masks(start, length) == grid.num_blocks(start, length) * block
    assert grid.most_masks(start, length) == length // block * block


def admit_of(state: RequestState) -> Admit:
    spec = state.spec
    place = (spec.output_start, spec.output_end, spec.limit, spec.decoding)
    return Admit(0, list(state.canvas), *place, state.steps, state.steps_in_block)


@settings(max_examples=30)
@given(
    prompt=st.integers(1, 13),
    length=st.integers(1, 20),
    block=st.integers(1, 6),
    cache=st.sampled_from(["dual", "prefix", "none"]),
    data=st.data(),
)
def test_every_key_that_a_span_sees_was_made_from_what_is_before_it_now(
    prompt: int, length: int, block: int, cache: str, data: st.DataObject
) -> None:
    """K/V of a column follow from the tokens up to its block's end; `made_from` has those of its last computation."""
    decoding = Decoding(block, cache=cache, block_causal=True)  # type: ignore[arg-type]
    canvas = [1] * prompt + [MASK] * decoding.grid.num_masks(prompt, length)
    state = RequestState(
        0, RequestSpec("r", canvas, prompt, len(canvas), prompt + length, decoding), 0.0, MASK, num_pages=1
    )
    resident, made_from, moved = resident_of(state), dict[int, list[int]](), True
    finished = ""
    while not finished:
        if resident.needs_recompute and data.draw(st.booleans()):  # it moves, or its instance is lost
            resident, made_from, moved = resident_of(state), {}, True
        assert state.block == resident.block
        part, tokens = resident.part(), resident.tokens.tolist()
        span, block_start = part.span, (prompt // block + resident.block) * block
        assert span.end == block_start + block, "nothing behind the block is computed"
        if moved or cache == "none":
            assert span.start == 0
        else:
            assert span.start == block_start - block * part.recompute, "the last block is stored for good"
        now = {column: tokens[: column // block * block + block] for column in range(span.end)}
        made_from |= {column: now[column] for column in range(span.start, span.end)}
        assert made_from == now
        assert (part.first, part.end) == (block_start, block_start + block)
        columns = [column for column in range(part.first, part.end) if tokens[column] == MASK]
        picked = sorted(data.draw(st.lists(st.sampled_from(columns), min_size=1, unique=True)))
        moved, finished = False, unmask(resident, picked, 3)
        state.apply(
            RequestStep(0, part.recompute, part.block, 0.9, picked, [3] * len(picked), [0.5] * len(picked))
        )
        state.check()
    assert finished == "length" and MASK not in state.canvas[: prompt + length]


def resident_of(state: RequestState) -> Resident:
    return Resident(admit_of(state), MASK, frozenset(), False)


def test_a_fixed_schedule_has_a_whole_blocks_quota_in_the_block_that_the_prompt_began() -> None:
    decoding = Decoding(8, rule="steps", value=4.0, block_causal=True)
    resident = Resident(Admit(0, [1] * 5 + [MASK] * 11, 5, 16, 16, decoding), MASK, frozenset(), False)
    assert resident.steps_quota == 2, "8 columns in 4 steps, of which 3 are masked"
    assert (resident.part().first, resident.part().end) == (0, 8)


@pytest.mark.parametrize(("start", "end"), [(0, 12), (4, 12), (8, 12)])
def test_the_blocks_of_a_span_see_the_keys_before_their_ends(start: int, end: int) -> None:
    parts = Span(0, 16, start, end, None, block_length=4).by_blocks()
    assert [(part.start, part.end, part.num_keys) for part in parts] == [
        (at, at + 4, at + 4) for at in range(start, end, 4)
    ]


def test_keys_are_in_pages_whatever_the_cache_mode() -> None:
    assert pages_needed(100, 32, Decoding(cache="none", block_causal=True)) == 4
    assert pages_needed(100, 32, Decoding(cache="none")) == 0


def test_recompute_steps_cost_two_blocks_each_and_the_prompt_once() -> None:
    work = RemainingWork((0.9, 0.5))
    for number, block_causal in enumerate((True, False)):
        decoding = Decoding(4, block_causal=block_causal)
        spec = RequestSpec("r", [1] * 40 + [MASK] * 16, 40, 56, 56, decoding)
        work.add(RequestState(number, spec, 0.0, MASK, num_pages=2), np.array([8.0, 4.0]))
    assert work.rows().recompute_tokens(1).tolist() == [40 / 4 + 8, 56]
    assert work.rows().recompute_tokens(4).tolist() == [40 / 4 + 8, 16 + 40 / 4]


INFO = replace(
    read_model_info(resolve("tiny"), "tiny"), block_causal=True, trained_block_length=4, generation={}
)
TOKENIZER = Tokenizer(INFO.path)


def spec_of(**fields: object) -> RequestSpec:
    request = parse_request("text", {"model": "tiny", "prompt": [7] * 10, **fields})
    encoded = encode_request(request, TOKENIZER, INFO, 512)
    [run] = plan_runs(request, encoded, "r", INFO, ServerConfig(), lambda: 7)
    return run.spec


def test_a_requests_canvas_ends_with_a_block() -> None:
    spec = spec_of(max_tokens=5)
    assert (spec.output_start, spec.limit, spec.output_end, len(spec.canvas)) == (10, 15, 16, 16)
    assert spec.decoding.block_causal and spec.decoding.block_length == 4
    assert spec_of(max_tokens=5, block_length=8).output_end == 16
    longest = spec_of(max_tokens=None, prompt=[7] * 510)
    assert (longest.limit, longest.output_end) == (512, 512)


def test_how_steps_are_shared_out_does_not_depend_on_where_the_prompt_ends() -> None:
    for prompt in ([7] * 10, [7] * 12):
        assert spec_of(max_tokens=8, steps=8, prompt=prompt).decoding.value == 4.0, "one token a step"
        for steps in (5, 10):
            with pytest.raises(RequestError, match="a multiple of the number of blocks, 2, and at most 8"):
                spec_of(max_tokens=8, steps=steps, prompt=prompt)


def test_there_is_no_infilling() -> None:
    with pytest.raises(RequestError, match="suffix is given, but tiny is block-causal"):
        spec_of(max_tokens=8, suffix="end")
