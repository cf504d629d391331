"""The Llumnix baseline: placed as INFaaS does; residents move to a faster instance at their block starts.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024), as the
baseline of the TeDiServe paper (arXiv 2606.29094) has it. The threshold is fixed.
"""

from collections.abc import Iterator

from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.view import Decision, Move, View

NEAR_BLOCK_START = 8  # masks left in a block: the worker runs ahead, so a move is asked for a little early


class Llumnix(Policy):
    def decide(self, now: float, view: View) -> Decision:
        return Decision(moves=tuple(greedy_moves(view, self.max_resident_tokens, margin=0.0)))


def greedy_moves(view: View, max_tokens: int | None, margin: float) -> Iterator[Move]:
    """Residents about to start a block whose step would be faster elsewhere, by a share `margin` at least.

    A step's latency is taken for a batch of all assigned tokens, after the move there and before it here.
    """
    near, serving = _near_block_start(view), view.cluster.serving()
    if not near or len(serving) < 2:
        return
    tokens = _tokens_after_moves(view, serving)
    target, there_s = _fastest(view, serving, tokens)
    for number in near:
        request = view.requests[number]
        source, num_tokens = view.cluster.instances[request.instance or ""], len(request.canvas)
        here, there = source.slot.index, target.slot.index
        if source is target:
            continue
        wanted_s = view.costs.step_s(source.tp_degree, tokens[here]) * (1 - margin)
        if there_s >= wanted_s:
            continue  # the usual case; with the request on it no batch is faster
        if view.costs.step_s(target.tp_degree, tokens[there] + num_tokens) >= wanted_s:
            continue
        if not view.has_room(target, request, max_tokens):
            continue
        yield Move(number, target.name)
        tokens[here] -= num_tokens
        tokens[there] += num_tokens
        target, there_s = _fastest(view, serving, tokens)


def _fastest(view: View, serving: list[Instance], tokens: list[float]) -> tuple[Instance, float]:
    """The instance whose step is the shortest, and its seconds: of a TP degree the one with the fewest tokens."""
    fewest: dict[int, Instance] = {}
    for instance in serving:
        before = fewest.setdefault(instance.tp_degree, instance)
        if tokens[instance.slot.index] < tokens[before.slot.index]:
            fewest[instance.tp_degree] = instance
    step_s = {degree: view.costs.step_s(degree, tokens[each.slot.index]) for degree, each in fewest.items()}
    degree = min(step_s, key=step_s.__getitem__)
    return fewest[degree], step_s[degree]


def _tokens_after_moves(view: View, serving: list[Instance]) -> list[float]:
    """Assigned tokens of each slot's instance once those that were asked back have moved."""
    tokens = [0.0] * len(view.cluster.slots)
    for instance in serving:
        tokens[instance.slot.index] = instance.num_tokens
    for number in view.moving:
        request = view.requests[number]
        here, there = (
            view.cluster.instances.get(name or "") for name in (request.instance, request.moving_to)
        )
        if here and there:
            tokens[here.slot.index] -= len(request.canvas)
            tokens[there.slot.index] += len(request.canvas)
    return tokens


def _near_block_start(view: View) -> list[int]:
    """On the instances that have ended a step."""
    names = [view.cluster.slots[slot].instance for slot in view.stepped_slots]
    residents = [number for name in names if name for number in view.cluster.instances[name].residents]
    return [number for number in residents if _may_move(view.requests[number])]


def _may_move(request: RequestState) -> bool:
    is_near = request.masks_in_block <= NEAR_BLOCK_START and request.moving_to is None
    return is_near and request.recomputes_left >= 1


def fastest_after(view: View, instances: list[Instance], num_tokens: int) -> Instance:
    """The instance whose step is the shortest once it has taken on so many tokens."""
    return min(
        instances, key=lambda i: (view.costs.step_s(i.tp_degree, i.num_tokens + num_tokens), i.num_tokens)
    )
