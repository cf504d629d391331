"""What is left to do for every live request, as arrays: the input of load control, placement and moves.

One row per live request, without gaps. Knows what a request has left (steps, recomputes, tokens, time to
its deadline), not what should be done about it.

Notation of the algorithms: S steps left at each threshold, R recompute steps among them, C = S - R cache
steps. Thresholds are in descending order, so index 0 is the highest.
"""

from typing import Any

import numpy as np

from dlmserve.control.policy.request import RequestState

COLUMNS = (
    "number", "priority", "deadline", "slo_s", "top", "bottom", "cap", "current", "block_length",
    "masks_in_block", "num_pages", "whole_tokens", "response_tokens", "causal_tokens", "refresh_blocks",
    "recomputes", "steps", "predicted_at", "slot", "moved_at", "going_to",
)  # fmt: skip
_INDEX = {name: i for i, name in enumerate(COLUMNS)}
WAITING = -1.0  # in the column `slot`
STAYING = -1.0  # in the column `going_to`, otherwise the slot that it will move to


class Rows:
    """Some or all rows. `top` .. `bottom`: the thresholds a request may get; equal where it is pinned."""

    def __init__(self, columns: np.ndarray, predicted: np.ndarray) -> None:
        self._columns, self._predicted = columns, predicted

    def __len__(self) -> int:
        return len(self._predicted)

    def __getitem__(self, name: str) -> np.ndarray:
        """A column, float64 [n]."""
        return self._columns[_INDEX[name]]

    def index(self, name: str) -> np.ndarray:
        """The same for indexing, int [n]."""
        return self[name].astype(np.intp)

    def steps_left(self) -> np.ndarray:
        """S, float [n, T]: every step since the prediction took one off; at least one is left."""
        since = self["steps"] - self["predicted_at"]
        return np.maximum(self._predicted - since[:, None], 1.0)

    def recomputes_left(self, steps: np.ndarray, steps_per_block: np.ndarray | None = None) -> np.ndarray:
        """R, float [n, T], at most S. `steps_per_block` [n, T]: only the blocks that S leaves time for count.

        An answer that ends early never starts its last blocks; the predicted steps know, the canvas doesn't.
        """
        whole = np.minimum(self["recomputes"][:, None], steps)
        return whole if steps_per_block is None else np.minimum(whole, steps / steps_per_block)

    def recompute_tokens(self, refresh_blocks: np.ndarray | float) -> np.ndarray:
        """Of a mean recompute step, float [n]: the whole canvas every so many blocks, else the response.

        Of a block-causal model: the prompt once, then the last block and the one that begins.
        """
        whole, response, causal = self["whole_tokens"], self["response_tokens"], self["causal_tokens"]
        return np.where(causal > 0, causal, response + (whole - response) / refresh_blocks)

    def tokens_left(
        self, steps: np.ndarray, recomputes: np.ndarray, recompute_tokens: np.ndarray
    ) -> np.ndarray:
        """R (P + O) + C B, float [n, T]."""
        return recomputes * recompute_tokens[:, None] + (steps - recomputes) * self["block_length"][:, None]

    def at(self, values: np.ndarray, level: str) -> np.ndarray:
        """Each row's own of `values` [n, T], at the threshold that the column `level` has; -> [n]."""
        num, num_levels = values.shape
        # With one index array a third of what two take.
        return values.take(np.arange(0, num * num_levels, num_levels) + self.index(level))


class RemainingWork:
    def __init__(self, thresholds: tuple[float, ...]) -> None:
        self.thresholds = np.array(sorted(thresholds, reverse=True))
        self._row_of: dict[int, int] = {}
        self._columns = np.zeros((len(COLUMNS), 64))
        self._cells = _cells(self._columns)
        self._predicted = np.zeros((64, len(thresholds)))

    def __len__(self) -> int:
        return len(self._row_of)

    def rows(self, numbers: list[int] | None = None) -> Rows:
        """All rows (columns are writable views), or copies of those requests' rows in that order."""
        if numbers is None:
            return Rows(self._columns[:, : len(self)], self._predicted[: len(self)])
        return self.take(np.fromiter(map(self._row_of.__getitem__, numbers), np.intp, len(numbers)))

    def take(self, indices: np.ndarray) -> Rows:
        return Rows(self._columns.take(indices, axis=1), self._predicted.take(indices, axis=0))

    def set(self, number: int, name: str, value: float) -> None:
        self._cells[name][self._row_of[number]] = value

    def get(self, number: int, name: str) -> float:
        return self._cells[name][self._row_of[number]]

    # ---- requests come, proceed and go

    def add(self, request: RequestState, steps_left: np.ndarray) -> None:
        """`steps_left`: predicted, float [T]."""
        row = len(self._row_of)
        if row == len(self._predicted):
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._cells = _cells(self._columns)
            self._predicted = np.concatenate([self._predicted, np.zeros_like(self._predicted)])
        self._row_of[request.number] = row
        values = self._values(request)
        self._columns[:, row] = [values[name] for name in COLUMNS]
        self._predicted[row] = self._own_steps(request, _falling(steps_left))

    def _values(self, request: RequestState) -> dict[str, float]:
        spec = request.spec
        top, bottom = self._bounds(request)
        return {
            "number": request.number,
            "priority": spec.priority,
            "deadline": request.deadline,
            "slo_s": np.inf if spec.slo_s is None else spec.slo_s,
            "top": top,
            "bottom": bottom,
            "cap": top,
            "current": top,
            "block_length": spec.decoding.block_length,
            "masks_in_block": request.masks_in_block,
            "num_pages": request.num_pages,
            "whole_tokens": len(request.canvas),
            "response_tokens": len(request.canvas) - spec.output_start,
            "causal_tokens": _causal_recompute_tokens(request),
            "refresh_blocks": request.refresh_blocks,
            "recomputes": request.recomputes_left,
            "steps": request.steps,
            "predicted_at": request.steps,
            "slot": WAITING,
            "moved_at": -np.inf,
            "going_to": STAYING,
        }

    def _bounds(self, request: RequestState) -> tuple[int, int]:
        spec = request.spec
        if spec.pinned:
            nearest = int(np.abs(self.thresholds - spec.decoding.value).argmin())
            return nearest, nearest
        num_allowed = int((self.thresholds >= (spec.min_threshold or 0.0)).sum())
        return 0, max(num_allowed - 1, 0)

    def _own_steps(self, request: RequestState, steps_left: np.ndarray) -> np.ndarray | float:
        decoding = request.spec.decoding
        if decoding.rule == "steps":
            return request.num_blocks * decoding.value - request.steps
        return steps_left[self._bounds(request)[0]] if request.spec.pinned else steps_left

    def predict(self, requests: list[RequestState], at_steps: list[int], steps_left: np.ndarray) -> None:
        """New predictions, float [n, T], made when the requests had done `at_steps` steps."""
        rows = [self._row_of[request.number] for request in requests]
        self._columns[_INDEX["predicted_at"], rows] = at_steps
        self._predicted[rows] = _falling(steps_left)
        for row, request in zip(rows, requests, strict=True):
            if request.spec.pinned:
                self._predicted[row] = self._own_steps(request, self._predicted[row])

    def proceed(self, requests: list[RequestState]) -> None:
        """These have made a step."""
        steps, recomputes = self._cells["steps"], self._cells["recomputes"]
        masks_in_block = self._cells["masks_in_block"]
        for request in requests:
            row = self._row_of[request.number]
            steps[row], recomputes[row] = request.steps, request.recomputes_left
            masks_in_block[row] = request.masks_in_block

    def remove(self, number: int) -> None:
        row, last = self._row_of.pop(number), len(self._row_of)
        if row != last:
            self._columns[:, row] = self._columns[:, last]
            self._predicted[row] = self._predicted[last]
            self._row_of[int(self._columns[_INDEX["number"], row])] = row

    def check(self, requests: dict[int, RequestState]) -> None:
        """Raises AssertionError where rows and requests do not match."""
        rows = self.rows()
        assert self._row_of.keys() == requests.keys(), "rows and requests differ"
        assert [self._row_of[int(number)] for number in rows["number"]] == list(range(len(rows)))
        assert (rows["top"] <= rows["bottom"]).all()
        for request in requests.values():
            assert self.get(request.number, "steps") == request.steps
            assert (self.get(request.number, "slot") == WAITING) == (request.instance is None)


def _cells(columns: np.ndarray) -> dict[str, Any]:
    """The columns by name, for single cells: a tenth of what an array's take."""
    return {name: memoryview(column) for name, column in zip(COLUMNS, columns, strict=True)}


def _causal_recompute_tokens(request: RequestState) -> float:
    """Of a mean recompute step; 0 where the model is not block-causal."""
    spec, decoding = request.spec, request.spec.decoding
    if not decoding.block_causal:
        return 0.0
    return causal_recompute_tokens(spec.output_start, request.num_blocks, decoding.block_length)


def causal_recompute_tokens(prompt: Any, num_blocks: Any, block_length: int) -> Any:
    """Of a mean recompute step of a block-causal model: the prompt once, then the last block with the one that begins.

    `prompt` tokens and `num_blocks`: numbers or arrays of them.
    """
    return prompt / num_blocks + 2 * block_length


def _falling(steps_left: np.ndarray) -> np.ndarray:
    """A lower threshold never takes more steps, whatever a predictor says."""
    return np.maximum.accumulate(steps_left[..., ::-1], axis=-1)[..., ::-1]
