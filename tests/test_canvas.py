"""A request's canvas under any order of unmasking: blocks left to right, each column once, the right end."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from dlmserve.messages import Admit, Decoding
from dlmserve.worker.canvas import Resident

MASK, EOS = 99, 98


def unmask(resident: Resident, columns: Iterable[int], token: int) -> str:
    """A step that does so; whether the request is finished."""
    part = resident.part()
    resident.count_step()
    resident.tokens[list(columns)] = token
    if token == EOS:
        resident.see_end_token()
    stays = (
        MASK in resident.tokens[resident.part().first : resident.part().end] and not resident.may_end_in_block
    )
    finished = resident.settle()
    if stays:
        assert not finished and resident.block == part.block, (
            "the engine does not look at it after such a step"
        )
    return finished


@given(
    prompt=st.integers(1, 9),
    num_masks=st.integers(1, 30),
    suffix=st.integers(0, 3),
    block=st.integers(1, 8),
    cache=st.sampled_from(["none", "prefix", "dual"]),
    refresh=st.integers(1, 3),
    shifted=st.booleans(),
    data=st.data(),
)
def test_every_column_is_unmasked_once_block_by_block(
    prompt: int,
    num_masks: int,
    suffix: int,
    block: int,
    cache: str,
    refresh: int,
    shifted: bool,
    data: st.DataObject,
) -> None:
    limit = prompt + data.draw(st.integers(1, num_masks))
    canvas = [1] * prompt + [MASK] * num_masks + [2] * suffix
    decoding = Decoding(block_length=block, cache=cache, refresh_blocks=refresh)  # type: ignore[arg-type]
    admit = Admit(0, canvas, prompt, prompt + num_masks, limit, decoding)
    resident = Resident(admit, MASK, frozenset({EOS}), shifted)
    seen: set[int] = set()
    finished, last_block = "", -1
    while not finished:
        part = resident.part()
        span = part.span
        columns = [column for column in range(part.first, part.end) if resident.tokens[column] == MASK]
        block_start = prompt + resident.block * block
        assert resident.block >= last_block, "blocks go left to right"
        assert part.begins == (resident.block != last_block) and part.block == resident.block
        assert part.recompute == (cache == "none" or resident.block != last_block)
        assert columns and not set(columns) & seen
        assert all(block_start <= column < min(block_start + block, prompt + num_masks) for column in columns)
        assert all(span.start <= max(0, column - shifted) < span.end for column in columns), (
            "rows are computed"
        )
        if part.recompute:
            assert span.is_whole or (refresh > 1 and span.start == prompt and span.end == len(canvas))
        else:
            assert span.start == block_start
            assert span.end == (
                len(canvas) if cache == "prefix" else min(block_start + block, prompt + num_masks)
            )
        last_block = resident.block
        picked = (
            columns if part.forced else data.draw(st.lists(st.sampled_from(columns), min_size=1, unique=True))
        )
        seen |= set(picked)
        token = data.draw(st.sampled_from([3, 3, 3, EOS]))
        finished = unmask(resident, picked, token)
    output = resident.tokens[prompt:limit].tolist()
    before_eos = output[: output.index(EOS)] if EOS in output else output
    if finished == "stop":
        assert EOS in output and MASK not in before_eos
    else:
        assert MASK not in output and EOS not in output
    assert resident.tokens[:prompt].tolist() == [1] * prompt
    assert resident.tokens[prompt + num_masks :].tolist() == [2] * suffix


def test_a_fixed_schedule_gives_the_remainder_to_the_first_steps() -> None:
    decoding = Decoding(block_length=10, rule="steps", value=4.0)
    resident = Resident(Admit(0, [1] + [MASK] * 10, 1, 11, 11, decoding), MASK, frozenset(), False)
    quotas = []
    while True:
        quota = resident.steps_quota
        quotas.append(quota)
        first = resident.tokens.tolist().index(MASK)
        if unmask(resident, range(first, first + quota), 3):
            break
    assert quotas == [3, 3, 2, 2]
