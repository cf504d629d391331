"""The TeDiServe policy as its paper has it: load in tokens, thresholds by Algorithms 1 and 2, greedy moves.

Source: TeDiServe (arXiv 2606.29094); the options `alg1` and `alg2` are the ablations of its evaluation.
Requests are served in the order of their arrival, within 8192 resident tokens per instance.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.llumnix import fastest_after, greedy_moves
from dlmserve.control.policy.outlook import Outlook
from dlmserve.control.policy.slo_policy import SloPolicy
from dlmserve.control.policy.threshold import greedy_caps
from dlmserve.control.policy.view import Move, View


class Tediserve(SloPolicy):
    known_options = SloPolicy.known_options | {
        "drop_late": 1.0,
        "supply": 1.0,
        "margin": 0.05,  # a move must make the step faster by this share
    }

    def choose(self, view: View, instances: list[Instance], num_tokens: int) -> Instance:
        """Algorithm 3: the instance with the shortest step once the request is on it, among all with room."""
        return fastest_after(view, instances, num_tokens)

    def caps(self, now: float, view: View) -> np.ndarray:
        """Algorithm 2 over active and waiting requests, by priority, then by arrival."""
        rows = view.work.rows()
        slos = rows["slo_s"][np.isfinite(rows["slo_s"])]
        if not len(slos):
            return rows.index("top")
        outlook = Outlook(view, rows)
        supply = self.options["supply"] * float(slos.mean()) * self._tokens_per_s(view, outlook)
        order = np.lexsort((rows["number"], -rows["priority"]))
        caps = np.empty(len(rows), dtype=int)
        caps[order] = greedy_caps(outlook.tokens[order], rows["top"][order], rows["bottom"][order], supply)
        return caps

    def _tokens_per_s(self, view: View, outlook: Outlook) -> float:
        """Of all instances, each with as many mean requests as its resident tokens allow."""
        seats = (self.max_resident_tokens or np.inf) // float(outlook.rows["whole_tokens"].mean())
        step_tokens = float(outlook.step_tokens.mean())
        total = 0.0
        kinds = Counter((each.tp_degree, each.max_num_seqs) for each in view.cluster.serving())
        for (tp_degree, max_num_seqs), num in kinds.items():
            batch = min(max(seats, 1.0), max_num_seqs) * step_tokens
            total += num * batch / view.costs.step_s(tp_degree, batch)
        return total

    def step_moves(self, view: View) -> Iterable[Move]:
        return greedy_moves(view, self.max_resident_tokens, self.options["margin"])
