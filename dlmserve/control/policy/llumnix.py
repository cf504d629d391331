"""The Llumnix baseline: placed as INFaaS does; residents move to a faster instance at their block starts.

Source: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024), as the
baseline of the TeDiServe paper (arXiv 2606.29094) has it. The threshold is fixed.
"""

from collections.abc import Iterator
from operator import itemgetter

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
    stepped, serving = _near_block_start(view), view.cluster.serving()
    if not stepped or len(serving) < 2:
        return
    tokens = _tokens_after_moves(view, serving)
    target, there_s = _fastest(view, serving, tokens)
    for source, near in stepped:
        here = source.slot.index
        wanted_s = view.costs.step_s(source.tp_degree, tokens[here]) * (1 - margin)
        for request in near:
            if source is target or there_s >= wanted_s:
                break  # the usual case; with the request on it no batch is faster
            there, num_tokens = target.slot.index, len(request.canvas)
            if view.costs.step_s(target.tp_degree, tokens[there] + num_tokens) >= wanted_s:
                continue
            if not view.has_room(target, request, max_tokens):
                continue
            yield Move(request.number, target.name)
            tokens[here] -= num_tokens
            tokens[there] += num_tokens
            target, there_s = _fastest(view, serving, tokens)
            wanted_s = view.costs.step_s(source.tp_degree, tokens[here]) * (1 - margin)


def _fastest(view: View, serving: list[Instance], tokens: list[float]) -> tuple[Instance, float]:
    """The instance whose step is the shortest, and its seconds: of a TP degree the one with the fewest tokens."""
    fewest: dict[int, tuple[float, Instance]] = {}
    for instance in serving:
        slot = instance.slot
        held, before = tokens[slot.index], fewest.get(slot.tp_degree)
        if before is None or held < before[0]:
            fewest[slot.tp_degree] = held, instance
    pairs = [(each, view.costs.step_s(degree, held)) for degree, (held, each) in fewest.items()]
    return min(pairs, key=itemgetter(1))


def _tokens_after_moves(view: View, serving: list[Instance]) -> list[float]:
    """Assigned tokens of each slot's instance once those that were asked back have moved."""
    tokens, instances = [0.0] * len(view.cluster.slots), view.cluster.instances
    for instance in serving:
        tokens[instance.slot.index] = instance.num_tokens
    for number in view.moving:
        request = view.requests[number]
        here, there = instances.get(request.instance or ""), instances.get(request.moving_to or "")
        if here and there:
            num_tokens = len(request.canvas)
            tokens[here.slot.index] -= num_tokens
            tokens[there.slot.index] += num_tokens
    return tokens


def _near_block_start(view: View) -> list[tuple[Instance, list[RequestState]]]:
    """On the instances that have ended a step; those without any are left out."""
    names = [view.cluster.slots[slot].instance for slot in view.stepped_slots]
    sources = [view.cluster.instances[name] for name in names if name]
    pairs = [(each, _movable([view.requests[number] for number in each.residents])) for each in sources]
    return [pair for pair in pairs if pair[1]]


def _movable(residents: list[RequestState]) -> list[RequestState]:
    near = [each for each in residents if each.masks_in_block <= NEAR_BLOCK_START]
    return [each for each in near if each.moving_to is None and each.recomputes_left >= 1]


def fastest_after(view: View, instances: list[Instance], num_tokens: int) -> Instance:
    """The instance whose step is the shortest once it has taken on so many tokens."""
    return min(
        instances, key=lambda i: (view.costs.step_s(i.tp_degree, i.num_tokens + num_tokens), i.num_tokens)
    )
