"""Problems for the planner's tests: small clusters of the `h100-nvlink` preset."""

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
