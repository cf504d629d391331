"""Stage 2 of the planner, greedy: which instances stay and on which nodes new ones are formed.

As many stay as can, where TP degrees are powers of two and divide the nodes; `control/planning/slots.py` is the
integer program that it is tested against, and the way for everything else. An instance's GPUs are any of its
node's. Knows nothing of requests and of the order in which a change is carried out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

Victims = tuple[int, ...]  # how many instances of each smaller degree give way, by ascending degree


class Movement(NamedTuple):
    kept: tuple[int, ...]  # indices of present instances
    new: tuple[tuple[str, int], ...]  # (node, TP degree)


def least_movement(
    nodes: Mapping[str, int], present: Sequence[tuple[str, int]], layout: Iterable[int]
) -> Movement:
    """`nodes`: GPUs of each; `present`: (node, TP degree) of each instance, those first that should rather stay.

    What does not fit is left out. Largest degrees first, each where it costs the fewest instances that the
    layout still wants. Among equals it matters who gives way, and no rule is always right: small ones, or
    large ones; both are tried.
    """
    wanted = Counter(layout)
    found = [_Greedy(nodes, present, wanted, small).run() for small in (True, False)]
    return max(found, key=lambda each: (len(each.kept) + len(each.new), len(each.kept)))


class _Greedy:
    def __init__(
        self,
        nodes: Mapping[str, int],
        present: Sequence[tuple[str, int]],
        wanted: Counter[int],
        small_give_way: bool,
    ) -> None:
        self._wanted, self._small_give_way = wanted, small_give_way
        self._present = [
            (index, node, degree) for index, (node, degree) in enumerate(present) if node in nodes
        ]
        self._degrees = sorted({degree for _, _, degree in self._present} | set(wanted))
        # What is not decided yet: GPUs that nobody holds, and instances that may still stay.
        self._free = dict(nodes)
        self._held = {node: Counter[int]() for node in nodes}
        for _, node, degree in self._present:
            self._free[node] -= degree
            self._held[node][degree] += 1

    def run(self) -> Movement:
        kept: list[int] = []
        new: list[tuple[str, int]] = []
        for degree in reversed(self._degrees):
            staying = self._stay(degree)
            kept += staying
            for _ in range(self._wanted[degree] - len(staying)):
                node = self._make_room(degree)
                if node is None:
                    break
                self._free[node] -= degree
                new.append((node, degree))
        return Movement(tuple(sorted(kept)), tuple(new))

    def _stay(self, degree: int) -> list[int]:
        """Those of this degree that stay; the GPUs of the others are free from now on."""
        left = {node: held.pop(degree, 0) for node, held in self._held.items()}
        staying = []
        for index, node, own in self._present:
            if own == degree and left[node] and len(staying) < self._wanted[degree]:
                left[node] -= 1
                staying.append(index)
        for node, num in left.items():
            self._free[node] += degree * num
        return staying

    def _make_room(self, degree: int) -> str | None:
        """Frees `degree` GPUs of one node; None where none has as many."""
        smaller = [each for each in self._degrees if each < degree]
        best: tuple[tuple, str, Victims] | None = None
        seen = set()
        for node, free in self._free.items():
            held = tuple(self._held[node][each] for each in smaller)
            if (free, held) in seen:  # as good as another one
                continue
            seen.add((free, held))
            for victims in _victims(smaller, held, degree - free):
                price = self._price(smaller, victims)
                if best is None or price < best[0]:
                    best = price, node, victims
        if best is None:
            return None
        _, node, victims = best
        for each, num in zip(smaller, victims, strict=True):
            self._held[node][each] -= num
            self._free[node] += each * num
        return node

    def _price(self, smaller: list[int], victims: Victims) -> tuple:
        """Instances lost that the layout wants, then who gives way."""
        lost = 0
        for degree, num in zip(smaller, victims, strict=True):
            surplus = sum(held[degree] for held in self._held.values()) - self._wanted[degree]
            lost += max(num - max(surplus, 0), 0)
        largest_first = victims[::-1]
        return lost, largest_first if self._small_give_way else tuple(-num for num in largest_first)


def _victims(smaller: list[int], held: tuple[int, ...], missing: int) -> Iterable[Victims]:
    """Every choice of instances whose GPUs are enough, none of a degree more than alone would do."""
    most = [min(num, max(-(-missing // degree), 0)) for degree, num in zip(smaller, held, strict=True)]
    for victims in product(*(range(num + 1) for num in most)):
        if sum(degree * num for degree, num in zip(smaller, victims, strict=True)) >= missing:
            yield victims
