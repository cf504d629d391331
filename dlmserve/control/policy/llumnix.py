"""The Llumnix baseline: placed as INFaaS does; residents move to a faster instance at their block starts.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024), as the
baseline of the TeDiServe paper (arXiv 2606.29094) has it. The threshold is fixed.
"""

from collections.abc import Iterator

from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.outlook import residents_of
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.remaining import STAYING
from dlmserve.control.policy.view import Decision, Move, View

NEAR_BLOCK_START = 8  # masks left in a block: the worker runs ahead, so a move is asked for a little early


class Llumnix(Policy):
    def decide(self, now: float, view: View) -> Decision:
        return Decision(moves=tuple(greedy_moves(view, self.max_resident_tokens, margin=0.0)))


def greedy_moves(view: View, max_tokens: int | None, margin: float) -> Iterator[Move]:
    """Residents about to start a block whose step would be faster elsewhere, by a share `margin` at least.

    A step's latency is taken for a batch of all assigned tokens, after the move there and before it here.
    """
    if not view.stepped_slots:
        return
    serving = [instance for instance in view.cluster.instances.values() if instance.serving]
    if len(serving) < 2:
        return
    tokens = _tokens_after_moves(view, serving)
    step_s = {i.name: view.costs.step_s(i.tp_degree, tokens[i.name]) for i in serving}
    target = min(serving, key=lambda instance: step_s[instance.name])
    for number in _near_block_start(view):
        request = view.requests[number]
        source = view.cluster.instances[request.instance or ""]
        there = view.costs.step_s(target.tp_degree, tokens[target.name] + len(request.canvas))
        if source is target or there >= step_s[source.name] * (1 - margin):
            continue
        if not view.has_room(target, request, max_tokens):
            continue
        yield Move(number, target.name)
        for instance, change in ((source, -len(request.canvas)), (target, len(request.canvas))):
            tokens[instance.name] += change
            step_s[instance.name] = view.costs.step_s(instance.tp_degree, tokens[instance.name])
        target = min(serving, key=lambda instance: step_s[instance.name])


def _tokens_after_moves(view: View, serving: list[Instance]) -> dict[str, int]:
    """Assigned tokens by instance, once those that were asked back have moved."""
    tokens = {instance.name: instance.num_tokens for instance in serving}
    rows = view.work.rows()
    for number in rows.index("number")[rows["going_to"] != STAYING].tolist():
        request = view.requests[number]
        for name, change in (
            (request.instance, -len(request.canvas)),
            (request.moving_to, len(request.canvas)),
        ):
            if name in tokens:
                tokens[name] += change
    return tokens


def _near_block_start(view: View) -> list[int]:
    """On the instances that have ended a step."""
    rows = residents_of(view, view.stepped_slots)
    near = (
        (rows["masks_in_block"] <= NEAR_BLOCK_START)
        & (rows["recomputes"] >= 1)
        & (rows["going_to"] == STAYING)
    )
    return rows.index("number")[near].tolist()


def fastest_after(view: View, instances: list[Instance], num_tokens: int) -> Instance | None:
    """The instance whose step is the shortest once it has taken on so many tokens."""
    return min(
        instances,
        key=lambda i: (view.costs.step_s(i.tp_degree, i.num_tokens + num_tokens), i.num_tokens),
        default=None,
    )
