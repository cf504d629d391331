"""Problems for the planner's tests: small clusters of the `h100-nvlink` preset."""

import random

from dlmserve.control.planning.slots import Held
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.plan import Problem, RequestClass

THRESHOLDS = [0.9, 0.8, 0.7, 0.6, 0.5]
TOKENS_PER_STEP = [3.02, 3.89, 4.77, 5.65, 6.58]
GSM8K = (1075.0, 256.0)


def make_problem(
    rps: float, slo_s: float | None = 9.5, degrees: tuple[int, ...] = (1, 2, 4), **fields
) -> Problem:
    """`rps` requests a second of the lengths of GSM8K with five examples, on two nodes of four GPUs."""
    costs = CostModel.from_preset(fields.pop("preset", "h100-nvlink"))
    return Problem(
        classes=fields.pop("classes", [RequestClass(*GSM8K, rps, slo_s)]),
        nodes=fields.pop("nodes", [4, 4]),
        tp_degrees=list(degrees),
        thresholds=THRESHOLDS,
        tokens_per_step=TOKENS_PER_STEP,
        step_s={degree: costs.points(degree) for degree in degrees},
        **fields,
    )


def aligned_case(rng: random.Random, max_nodes: int = 4) -> tuple[list[int], list[Held], dict[int, int]]:
    """Equal nodes of four or eight GPUs, instances on them, and another layout that fits: nodes, present, wanted."""
    size, num_nodes = rng.choice((4, 8)), rng.randint(1, max_nodes)
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
