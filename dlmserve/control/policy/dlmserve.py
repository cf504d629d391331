"""Our own policy: everything that goes beyond the TeDiServe paper, each part with a switch.

* `instance_seconds`: load control counts the time that work takes instances, not its tokens.
* `levels`: everybody's threshold falls together, and only as far as each deadline needs.
* `eos_aware`: blocks that a request's predicted steps leave no time for are not counted.
* `least_slack`: who must start first goes first; who is lost anyhow goes last.
* `efficient_batch`: an instance takes no more requests than make its steps efficient, or keep them short for the SLOs.
* `stagger`: requests that start a block in the same step recompute one after another, not all at once.
* `refresh`: under load, recompute steps compute the response only, before thresholds fall far.
* `moves`: the STAR look-ahead, only for a predicted gain and with a cool-down.

The number of residents is bounded by KV memory, not by 8192 tokens.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.line import Line
from dlmserve.control.policy.outlook import Outlook, all_residents
from dlmserve.control.policy.rebalance import Limits, look_ahead
from dlmserve.control.policy.remaining import Rows
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.slo_policy import SloPolicy
from dlmserve.control.policy.threshold import deadline_limits, greedy_caps, level_caps
from dlmserve.control.policy.view import NOTHING, Decision, Move, View

REBALANCE_S = 0.5
LIMITS = Limits(min_gain=0.1, min_gain_s=0.2, cool_down_s=3.0, max_moves=2)
REFRESH_HOLD_S = 3.0  # between two changes of the refresh lever
REFRESH_HYSTERESIS = 0.7  # of the supply that must do before the lever is let go
REFRESH_PAYS = 0.95  # the work that is left with it, at most, as a share of the work without
INEFFICIENCY = 1.05  # cost per token that a batch may have over the cheapest
SHORT_STAY = 0.25  # of the SLO: while requests stay no longer, a larger batch does no harm
STAGGER_TOKENS = 2048  # where a token is cheapest on an H100: larger steps take longer than in proportion
TURNAROUND_STEPS = 2  # that a seat stays empty: the next step has begun when the head hears of the free seat


class Free(NamedTuple):
    """KV pages, tokens of canvases and tokens of a step that an instance still takes."""

    instance: Instance
    pages: float
    tokens: float
    step_tokens: float


class Demand(NamedTuple):
    """`work` is left of each row at each threshold [n, T], `rate`: what the cluster does of it per second."""

    outlook: Outlook
    work: np.ndarray
    rate: float
    slack_s: np.ndarray
    savable: np.ndarray


class Dlmserve(SloPolicy):
    known_options = SloPolicy.known_options | {
        "supply": 0.8,
        "caution": 1.15,
        "reserve": 0.05,
        "instance_seconds": 1.0,
        "levels": 1.0,
        "eos_aware": 1.0,
        "least_slack": 1.0,
        "efficient_batch": 1.0,
        "stagger": 1.0,
        "refresh": 1.0,
        "refresh_blocks": 8.0,  # whole canvas every so many blocks, where the lever is used
        "refresh_supply": 0.25,  # share of the capacity that must do for 0.9 without it
    }
    max_resident_tokens = None
    round_share = 0.02  # deadlines near no faster

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config)
        self._usual_refresh = config.refresh_blocks
        self.recompute_tokens = STAGGER_TOKENS if self.options["stagger"] else 0
        self._refreshing = False
        self._refresh_changed_at = self._rebalanced_at = -np.inf
        self._batches = [0.0] * len(config.tp_layout)  # expected tokens of a step, by slot,
        self._shares: dict[int, float] = {}  # and of each request
        self._most_tokens: dict[int, float] = {}  # of a step, by TP degree
        self._line = Line(self.outlook, self._slack_s, bool(self.options["least_slack"]))

    def outlook(self, view: View, rows: Rows, refresh_blocks: float | None = None) -> Outlook:
        speeds = view.history.tokens_per_step(view.work.thresholds) if self.options["eos_aware"] else None
        return Outlook(view, rows, speeds, refresh_blocks)

    # ---- placement

    def placements(self, now: float, view: View) -> Iterator[tuple[RequestState, Instance]]:
        self._update_batches(view)
        free = [self._free(view, each) for each in view.cluster.instances.values() if each.has_room(0)]
        if not any(each.step_tokens > 0 for each in free):
            return
        self._line.update(now, view, self._step_s)
        for place, request in self._line.waiting(view, self._line.fitting(_most(free))):
            pages, tokens, step_tokens = self._line.needs[place].tolist()
            fit = [
                e for e in free if pages <= e.pages and tokens <= e.tokens and step_tokens <= e.step_tokens
            ]
            if not fit:
                continue
            chosen = self._shortest_step(view, fit, step_tokens)
            instance = chosen.instance
            view.stays.placed(request.number, now, float(self._line.stays_s[place]))
            yield request, instance
            self._batches[instance.slot.index] += step_tokens
            self._shares[request.number] = step_tokens
            self._line.placed(place)
            free.remove(chosen)
            if instance.has_room(0):
                free.append(self._free(view, instance))
            if not len(self._line) or not any(each.step_tokens > 0 for each in free):
                return
            if not len(self._line.fitting(_most(free))):
                return

    def _update_batches(self, view: View) -> None:
        """Of the instances whose residents have changed since they were surveyed."""
        num_new = len(view.cluster.slots) - len(self._batches)  # another layout is wanted
        self._batches += [0.0] * num_new
        for slot in view.changed_slots:
            instance = view.cluster.instances.get(view.cluster.slots[slot].instance or "")
            residents = instance.residents if instance else ()
            self._batches[slot] = sum(self._shares.get(number, 0.0) for number in residents)

    def survey(self, residents: Outlook) -> None:
        """What placement goes by until the next time."""
        self._batches = residents.batches().tolist()
        shares = zip(residents.rows.index("number").tolist(), residents.step_tokens.tolist(), strict=True)
        self._shares = dict(shares)
        self._most_tokens.clear()

    def _free(self, view: View, instance: Instance) -> Free:
        room = view.room_of(instance, self.max_resident_tokens)
        if not instance.residents:
            return Free(*room, math.inf)
        most = self._most_step_tokens(view, instance.tp_degree)
        return Free(*room, most - self._batches[instance.slot.index])

    def _most_step_tokens(self, view: View, degree: int) -> float:
        """As long as its residents are as they were surveyed."""
        if not self.options["efficient_batch"]:
            return math.inf
        if degree not in self._most_tokens:
            self._most_tokens[degree] = self._find_most_tokens(view, degree)
        return self._most_tokens[degree]

    def _find_most_tokens(self, view: View, degree: int) -> float:
        """Of a step: efficient, or short."""
        taken_in_turn = 1 + TURNAROUND_STEPS / view.history.steps_per_request
        efficient = taken_in_turn * view.costs.efficient_tokens(degree, INEFFICIENCY)
        return max(efficient, view.costs.tokens_within(degree, self._short_step_s(view)))

    def _short_step_s(self, view: View) -> float:
        """Of steps that take a request through in a small part of the usual SLO; 0 without SLOs."""
        slo_s = view.work.rows()["slo_s"]
        slo_s = slo_s[np.isfinite(slo_s)]
        return SHORT_STAY * float(slo_s.mean()) / view.history.steps_per_request if len(slo_s) else 0.0

    def _step_s(self, view: View, tokens: np.ndarray) -> np.ndarray:
        """Of the slowest instance's batch with one more request, of so many tokens a step [n]."""
        degree = min(view.cluster.layout, default=1)
        return view.costs.step_s_many(degree, max(self._batches, default=0.0) + tokens)

    def _shortest_step(self, view: View, fit: list[Free], tokens: float) -> Free:
        """Whose instance's step is the shortest with the request on it: of a TP degree the smallest batch."""
        smallest: dict[int, tuple[float, Free]] = {}
        for each in fit:
            batch, degree = self._batches[each.instance.slot.index], each.instance.tp_degree
            if degree not in smallest or batch < smallest[degree][0]:
                smallest[degree] = batch, each
        if len(smallest) > 1:
            key = [(view.costs.step_s(d, batch + tokens), batch, d) for d, (batch, _) in smallest.items()]
            return smallest[min(key)[2]][1]
        [(_, found)] = smallest.values()
        return found

    def refresh_blocks(self, request: RequestState) -> int:
        decoding = request.spec.decoding
        usual = decoding.refresh_blocks
        has_lever = decoding.cache == "dual" and not decoding.block_causal
        if not self._refreshing or request.spec.pinned or not has_lever:
            return usual
        return max(usual, int(self.options["refresh_blocks"]))

    # ---- load control

    def decide(self, now: float, view: View) -> Decision:
        """Between two rounds of load control nothing: Algorithm 1 after each change of an instance's residents
        keeps no more deadlines (docs/scheduling.md), and would be on the way of a step's tokens."""
        return NOTHING

    def caps(self, now: float, view: View) -> np.ndarray:
        rows = view.work.rows()
        if not np.isfinite(rows["deadline"]).any() or not view.cluster.serving():
            return rows.index("top")
        blocks = (
            self._usual_refresh,
            self.options["refresh_blocks"],
        )  # of whole canvases, without the lever and with it
        outlook = self.outlook(view, rows, blocks[self._refreshing])
        demand = self._demand(now, view, outlook)
        if self.options["refresh"] and now >= self._refresh_changed_at + REFRESH_HOLD_S:
            other = self._demand(now, view, outlook.with_refresh(blocks[not self._refreshing]))
            usual, relaxed = (other, demand) if self._refreshing else (demand, other)
            if self._wants_refresh(usual, relaxed) != self._refreshing:
                self._refreshing, self._refresh_changed_at = not self._refreshing, now
                demand = other
        return self._caps_of(demand, self.options["supply"])

    def _wants_refresh(self, usual: Demand, relaxed: Demand) -> bool:
        """Where without it thresholds would have to fall, with some reserve, and if it pays."""
        if relaxed.outlook.tokens.sum() > REFRESH_PAYS * usual.outlook.tokens.sum():
            return False
        supply = self.options["refresh_supply"] * (REFRESH_HYSTERESIS if self._refreshing else 1.0)
        return bool((self._caps_of(usual, supply) > usual.outlook.rows["top"]).any())

    def _caps_of(self, demand: Demand, supply: float) -> np.ndarray:
        rows, work, rate = demand.outlook.rows, demand.work, demand.rate * supply
        if self.options["levels"]:
            limits = deadline_limits(demand.slack_s, demand.savable, rate)
            return level_caps(work, rows["top"], rows["bottom"], limits, rows["priority"])
        horizon_s = float(rows["slo_s"][np.isfinite(rows["slo_s"])].mean())
        order = np.lexsort((rows["number"], -rows["priority"]))
        caps = np.empty(len(rows), dtype=int)
        top, bottom = rows["top"][order], rows["bottom"][order]
        caps[order] = greedy_caps(work[order], top, bottom, rate * horizon_s)
        return caps

    def _demand(self, now: float, view: View, outlook: Outlook) -> Demand:
        """At the batch sizes that the load makes.

        A request's share of a step is its tokens' part and an equal part of what a step costs without any;
        in seconds of an instance of the smallest TP degree, others count by their speed.
        """
        serving = view.cluster.serving()
        degree = min(instance.tp_degree for instance in serving)
        mean_tokens = float(outlook.step_tokens.mean())
        seats = view.costs.efficient_tokens(degree, INEFFICIENCY) / mean_tokens
        if self.max_resident_tokens is not None:
            seats = min(seats, self.max_resident_tokens / float(outlook.rows["whole_tokens"].mean()))
        beside = min(max(len(outlook.rows) / len(serving), 1.0), max(seats, 1.0), serving[0].max_num_seqs)
        batch = beside * mean_tokens
        alone_s = view.costs.step_s(degree, batch)
        speed = 0.0
        for each, num in Counter(instance.tp_degree for instance in serving).items():
            speed += num * alone_s / (view.costs.step_s(each, batch) * view.pace.ratio(each))
        if self.options["instance_seconds"]:
            fixed_s, per_token_s = view.costs.line(degree, batch)
            work = outlook.steps * (fixed_s / beside) + outlook.tokens * per_token_s
            work = np.maximum.accumulate(work[:, ::-1], axis=1)[:, ::-1]
        else:
            work, speed = outlook.tokens, speed * batch / alone_s
        return Demand(outlook, work, speed, outlook.slack_s(now), outlook.savable(now))

    def refreshes(self, view: View) -> dict[int, int]:
        rows = view.work.rows()
        wanted = self.options["refresh_blocks"]
        off = rows["refresh_blocks"] < wanted if self._refreshing else rows["refresh_blocks"] >= wanted
        new = {n: self.refresh_blocks(view.requests[n]) for n in rows.index("number")[off].tolist()}
        return {n: blocks for n, blocks in new.items() if blocks != view.requests[n].refresh_blocks}

    # ---- moves

    def moves(self, now: float, view: View) -> Iterable[Move]:
        if now < self._rebalanced_at + REBALANCE_S or len(view.cluster.slots) < 2:
            return ()
        self._rebalanced_at = now
        outlook = self.outlook(view, all_residents(view))
        return look_ahead(now, view, outlook, self.max_resident_tokens, LIMITS)


def _most(free: list[Free]) -> np.ndarray:
    """That some instance has of each, float [3]; -1 where there is none."""
    needs = [(each.pages, each.tokens, each.step_tokens) for each in free] or [(-1.0, -1.0, -1.0)]
    return np.array(needs).max(axis=0)
