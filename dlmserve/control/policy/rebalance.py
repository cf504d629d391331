"""Which residents to move so that instances stay evenly loaded in the steps to come.

Source: STAR (arXiv 2510.13668), the look-ahead rebalance on predicted remaining work, mapped to denoising:
the work of an instance h steps ahead is the time that the tokens of those still resident then will take.
Only moves at block starts are considered, where the cache is rebuilt anyhow: they cost no step.
"""

from typing import NamedTuple

import numpy as np

from dlmserve.control.policy.outlook import Outlook
from dlmserve.control.policy.remaining import STAYING
from dlmserve.control.policy.view import Move, View

HORIZON = np.arange(0, 96, 8)  # steps ahead; a block of 32 tokens takes about 11 at threshold 0.9
DISCOUNT = 0.98  # per step
OVERLOAD = 0.1  # from the mean work, upwards and downwards
NEAR_BLOCK_START = 8  # masks left in the block: time for the Release to reach the worker before it runs on


class Limits(NamedTuple):
    min_gain: float  # of the imbalance, as a share of what it was
    min_gain_s: float  # of the moved request's predicted time to its end
    cool_down_s: float  # between two moves of one request
    max_moves: int


class Balance:
    """work [instances, horizon] in seconds; `seconds` [instances] per token of each."""

    def __init__(self, slots: np.ndarray, tokens: np.ndarray, steps: np.ndarray, seconds: np.ndarray) -> None:
        self._seconds = seconds
        self.alive = tokens[:, None] * (steps[:, None] > HORIZON)
        self.work = np.zeros((len(seconds), len(HORIZON)))
        np.add.at(self.work, slots, self.alive * seconds[slots][:, None])
        self._weights = DISCOUNT**HORIZON

    @property
    def imbalance(self) -> float:
        """J: the discounted variance of the instances' work over the horizon."""
        return float(self.work.var(axis=0) @ self._weights)

    def overloaded(self, sign: int) -> np.ndarray:
        """bool [instances]: above (sign 1) or below (-1) the mean by OVERLOAD."""
        mean = self.work.mean(axis=1)
        return sign * (mean - mean.mean()) > OVERLOAD * mean.mean()

    def gains(self, rows: np.ndarray, source: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Drop in J if row i leaves source[i] for target j, float [rows, targets]."""
        count = len(self.work)
        out = (self.alive[rows] * self._seconds[source][:, None])[:, None, :]
        into = self.alive[rows][:, None, :] * self._seconds[targets][None, :, None]
        squares = out**2 - 2 * out * self.work[source][:, None, :]
        squares = squares + into**2 + 2 * into * self.work[targets][None, :, :]
        total = self.work.sum(axis=0)
        change = squares / count - ((total + into - out) ** 2 - total**2) / count**2
        return -(change @ self._weights)

    def move(self, row: int, source: int, target: int) -> None:
        self.work[source] -= self.alive[row] * self._seconds[source]
        self.work[target] += self.alive[row] * self._seconds[target]


def look_ahead(
    now: float, view: View, outlook: Outlook, max_tokens: int | None, limits: Limits
) -> list[Move]:
    """Moves in the order of their gain, of the residents in `outlook`; at most `max_moves`."""
    serving = {instance.slot.index: instance for instance in view.cluster.serving()}
    if len(serving) < 2 or not len(outlook.rows):
        return []
    rows = outlook.rows
    index_of = np.full(len(view.cluster.slots), -1)
    index_of[list(serving)] = np.arange(len(serving))
    slots, degrees = list(serving), [instance.tp_degree for instance in serving.values()]
    tokens = outlook.step_tokens
    going_to = rows.index("going_to")
    home = index_of[np.where(going_to == STAYING, rows.index("slot"), going_to)]
    batches = np.bincount(home[home >= 0], tokens[home >= 0], minlength=len(serving))
    step_s = np.array([view.costs.step_s(d, n) for d, n in zip(degrees, batches, strict=True)])
    steps = rows.at(outlook.steps, "current")
    seconds = step_s / np.maximum(batches, 1.0)
    seconds[batches == 0] = seconds[batches > 0].mean() if (batches > 0).any() else 1.0
    balance = Balance(home, tokens, steps, seconds)
    movable = (
        (rows["masks_in_block"] <= NEAR_BLOCK_START)
        & (rows["recomputes"] >= 1)
        & (rows["going_to"] == STAYING)
        & (now - rows["moved_at"] >= limits.cool_down_s)
    )
    moves: list[Move] = []
    while len(moves) < limits.max_moves:
        candidates = np.flatnonzero(movable & balance.overloaded(1)[home])
        targets = np.flatnonzero(balance.overloaded(-1))
        if not len(candidates) or not len(targets):
            break
        gains = balance.gains(candidates, home[candidates], targets)
        row, target = np.unravel_index(int(gains.argmax()), gains.shape)
        chosen, goal = int(candidates[row]), int(targets[target])
        if gains[row, target] <= limits.min_gain * balance.imbalance:
            break
        movable[chosen] = False
        source, instance = int(home[chosen]), serving[slots[goal]]
        there_s = view.costs.step_s(degrees[goal], float(batches[goal] + tokens[chosen]))
        request = view.requests[int(rows["number"][chosen])]
        gained_s = float(steps[chosen] * (step_s[source] - there_s))
        if gained_s <= limits.min_gain_s or not view.has_room(instance, request, max_tokens):
            continue
        moves.append(Move(request.number, instance.name))
        balance.move(chosen, source, goal)
        home[chosen] = goal
        for place, change in ((source, -tokens[chosen]), (goal, tokens[chosen])):
            batches[place] += change
            step_s[place] = view.costs.step_s(degrees[place], float(batches[place]))
    return moves
