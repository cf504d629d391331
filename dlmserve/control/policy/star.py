"""The STAR baseline: threshold fixed; residents move where the predicted work to come is least.

Source: STAR (arXiv 2510.13668); placed as INFaaS does.
"""

import numpy as np

from dlmserve.control.policy.outlook import Outlook, all_residents
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.rebalance import Limits, look_ahead
from dlmserve.control.policy.view import Decision, View

REBALANCE_S = 0.25
LIMITS = Limits(min_gain=0.05, min_gain_s=0.0, cool_down_s=1.0, max_moves=4)


class Star(Policy):
    wants_predictions = True
    _rebalanced_at = -np.inf

    def control(self, now: float, view: View) -> Decision | None:
        if now < self._rebalanced_at + REBALANCE_S:
            return None
        self._rebalanced_at = now
        outlook = Outlook(view, all_residents(view))
        return Decision(moves=tuple(look_ahead(now, view, outlook, self.max_resident_tokens, LIMITS)))
