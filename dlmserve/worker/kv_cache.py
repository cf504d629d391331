"""Paged K/V of an instance: which pages a request holds, and the tensors behind them.

A page holds `page_size` tokens. A request's pages are reserved for its whole canvas on admission, as one run of
neighbours where there is one: then its K/V are a view; otherwise they are gathered. Knows nothing of requests'
contents or of attention.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlmserve.errors import OutOfPages


class PageAllocator:
    """Pages 0 .. num_pages - 1, each held by one owner or free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # sorted
        self._held: dict[int, list[int]] = {}

    @property
    def num_in_use(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, owner: int, count: int) -> list[int]:
        """`count` pages for `owner`: neighbours if possible. Raises OutOfPages, taking none."""
        if owner in self._held:
            raise OutOfPages(f"request {owner} holds {len(self._held[owner])} pages already; wanted none")
        if count > len(self._free):
            raise OutOfPages(
                f"request {owner} needs {count} KV pages but {len(self._free)} of {self.num_pages} are free"
            )
        at = self._first_run(count)
        pages = self._free[at : at + count]
        del self._free[at : at + count]
        self._held[owner] = pages
        return pages

    def _first_run(self, count: int) -> int:
        """Index in the free list of the first `count` neighbouring pages; 0 where there is no such run."""
        free = self._free
        start = 0
        for i in range(len(free)):
            if i and free[i] != free[i - 1] + 1:
                start = i
            if i - start + 1 >= count:
                return start
        return 0

    def free(self, owner: int) -> None:
        """No error for an owner that holds nothing."""
        self._free = sorted(self._free + self._held.pop(owner, []))

    def check(self) -> None:
        """Raises AssertionError unless every page is free or held exactly once."""
        held = [page for pages in self._held.values() for page in pages]
        if sorted(held + self._free) != list(range(self.num_pages)):
            raise AssertionError(
                f"pages {sorted(held)} held and {self._free} free do not make up {self.num_pages}"
            )
        if self._free != sorted(self._free):
            raise AssertionError(f"the free list is not sorted: {self._free}")


@dataclass(frozen=True, eq=False)
class Slots:
    """Where a canvas lives in the K/V tensors. index i64 [L]: its token slots; `start`, where they are neighbours."""

    index: np.ndarray
    start: int | None
    pages: list[int]
    # The index there, where they are not: that copy makes the host wait for a GPU.
    on_device: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.index)


class KVCache:
    """K and V of all layers: [num_layers, (num_pages + 1) * page_size, num_kv_heads, head_dim] each.

    The last page belongs to nobody: what pads a batch is written there (`scratch`).
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.page_size = page_size
        self.pages = PageAllocator(num_pages)
        shape = (num_layers, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.scratch = self._slots([num_pages], 1)

    def reserve(self, request: int, num_tokens: int) -> Slots:
        """Raises OutOfPages."""
        return self._slots(self.pages.allocate(request, -(-num_tokens // self.page_size)), num_tokens)

    def _slots(self, pages: list[int], num_tokens: int) -> Slots:
        offsets = np.arange(self.page_size)
        index = (np.array(pages)[:, None] * self.page_size + offsets).reshape(-1)[:num_tokens]
        neighbours = pages == list(range(pages[0], pages[0] + len(pages)))
        if neighbours:
            return Slots(index, pages[0] * self.page_size, pages)
        return Slots(index, None, pages, torch.from_numpy(index).to(self._k.device))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, num_kv_heads, head_dim] into token slots [T]."""
        self._k[layer].index_copy_(0, slots, k)
        self._v[layer].index_copy_(0, slots, v)

    def read(self, layer: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """K and V of one canvas, [L, num_kv_heads, head_dim] each: views where its pages are neighbours."""
        k, v = self.layer(layer)
        if slots.start is None:
            return k[slots.on_device], v[slots.on_device]
        run = slice(slots.start, slots.start + slots.num_tokens)
        return k[run], v[run]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of all token slots, [slots, num_kv_heads, head_dim] each."""
        return self._k[layer], self._v[layer]

    def paged(self, x: Tensor) -> Tensor:
        """A view of either as [pages, page_size, num_kv_heads, head_dim]."""
        return x.view(-1, self.page_size, *x.shape[1:])

    def check(self) -> None:
        self.pages.check()
