"""Random clusters for stage 2 of the planner: instances on nodes, and another layout that fits.

Used by the tests (a few cases) and by `bench.planner` (500).
"""

import random

from dlmserve.control.planning.slots import Held


def aligned_case(
    rng: random.Random, num_nodes: int | None = None, size: int | None = None
) -> tuple[list[int], list[Held], dict[int, int]]:
    """Equal nodes of four or eight GPUs, instances on them, and another layout that fits: nodes, present, wanted."""
    size, num_nodes = size or rng.choice((4, 8)), num_nodes or rng.randint(1, 4)
    present = []
    for node in range(num_nodes):
        gpus = list(range(size))
        rng.shuffle(gpus)
        for degree in _split(rng, size, size):
            present.append(Held(node, tuple(sorted(gpus[:degree]))))
            del gpus[:degree]
    wanted = _split(rng, size * num_nodes, size)
    return [size] * num_nodes, present, {degree: wanted.count(degree) for degree in sorted(set(wanted))}


def _split(rng: random.Random, num_gpus: int, largest: int) -> list[int]:
    """Powers of two that add up to `num_gpus`, or in one of three cases to less."""
    left = num_gpus if rng.random() < 2 / 3 else rng.randint(1, num_gpus)
    degrees = []
    while left:
        degrees.append(rng.choice([degree for degree in (1, 2, 4, 8) if degree <= min(left, largest)]))
        left -= degrees[-1]
    return degrees
