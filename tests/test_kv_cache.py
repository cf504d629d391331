"""Pages: held once or free, neighbours where possible; K/V written and read back at the right tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.errors import OutOfPages
from dlmserve.worker.kv_cache import KVCache, PageAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(1, 9)), max_size=60))
def test_any_sequence_of_reservations_keeps_the_books_straight(moves: list[tuple[bool, int, int]]) -> None:
    pages, held = PageAllocator(20), dict[int, list[int]]()
    for takes, owner, count in moves:
        if not takes:
            pages.free(owner)
            held.pop(owner, None)
        elif owner in held or count > 20 - sum(map(len, held.values())):
            with pytest.raises(OutOfPages):
                pages.allocate(owner, count)
        else:
            held[owner] = pages.allocate(owner, count)
            assert len(set(held[owner])) == count
        pages.check()
        assert pages.num_in_use == sum(map(len, held.values()))
    everyone = [page for mine in held.values() for page in mine]
    assert len(everyone) == len(set(everyone))


@given(st.sets(st.integers(0, 15)), st.integers(1, 6))
def test_a_run_of_neighbours_is_taken_where_there_is_one(taken: set[int], count: int) -> None:
    pages = PageAllocator(16)
    for page in range(16):
        pages.allocate(page, 1)
    for page in set(range(16)) - taken:
        pages.free(page)
    free = sorted(set(range(16)) - taken)
    runs = [
        free[i : i + count]
        for i in range(len(free) - count + 1)
        if free[i + count - 1] - free[i] == count - 1
    ]
    if len(free) >= count:
        got = pages.allocate(100, count)
        assert got == runs[0] if runs else set(got) <= set(free)


def test_written_tokens_are_read_back_by_their_owner_alone() -> None:
    cache = KVCache(2, 6, 4, 1, 2, torch.float32, "cpu")
    cache.reserve(0, 4)
    first = cache.reserve(1, 6)
    cache.reserve(2, 4)
    cache.pages.free(0)
    scattered = cache.reserve(3, 10)  # pages 0, 4, 5: not neighbours
    assert first.start == 4 and scattered.start is None
    for owner, slots in ((1.0, first), (3.0, scattered)):
        k = torch.arange(len(slots.index), dtype=torch.float32)[:, None, None].expand(-1, 1, 2) + 100 * owner
        cache.write(1, torch.from_numpy(slots.index), k, -k)
    for owner, slots in ((1.0, first), (3.0, scattered)):
        k, v = cache.read(1, slots)
        assert k[:, 0, 0].tolist() == [100 * owner + i for i in range(len(slots.index))]
        assert torch.equal(v, -k)
    assert not cache.read(0, first)[0].any(), "other layers are untouched"
