"""What can happen to the scheduler (events) and what it wants done about it (actions).

Values only. The live loop makes events of socket messages and performs the actions; a simulator or a
test does the same with whatever it likes.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from dlmserve.control.policy.cluster import RankId
from dlmserve.control.policy.plan import Plan, Problem
from dlmserve.control.policy.predictions import Progress
from dlmserve.control.policy.request import CancelOutcome, FinishReason, RequestSpec, StepUpdate, Summary
from dlmserve.control.policy.step_times import StepTime
from dlmserve.errors import DlmServeError
from dlmserve.messages import Command, StepReport

# ---- events


@dataclass(frozen=True)
class Arrived:
    request: int
    spec: RequestSpec


@dataclass(frozen=True)
class Cancelled:
    """Nobody wants the rest: a stop string was found, or the client left."""

    request: int
    outcome: CancelOutcome


class StepDone(msgspec.Struct, frozen=True):  # by far the most frequent one
    report: StepReport


@dataclass(frozen=True)
class NodeUp:
    node: str
    num_devices: int


@dataclass(frozen=True)
class NodeLost:
    """The node's agent is gone, and its ranks with it."""

    node: str
    reason: str


@dataclass(frozen=True)
class RankUp:
    """A new rank process, in no instance yet."""

    rank: RankId
    plan_endpoint: str
    pid: int | None = None  # on its node


@dataclass(frozen=True)
class RankLost:
    """`exited`: the process is known to be gone; otherwise it went silent and must be killed."""

    rank: RankId
    reason: str
    exited: bool


@dataclass(frozen=True)
class RankFormed:
    """`token_s`: what a step takes at most, per packed token."""

    instance: str
    tp_rank: int
    num_pages: int
    token_s: float = 0.0
    step_times: tuple[StepTime, ...] = ()  # measured on this instance's ranks


@dataclass(frozen=True)
class RankLeft:
    """A rank is out of its instance and free: asked to leave, or (`error`) because the instance broke."""

    instance: str
    tp_rank: int
    error: str


@dataclass(frozen=True)
class LayoutWanted:
    """From now on instances of these TP degrees; a layout that does not fit the devices changes nothing."""

    layout: tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """The answer to a MakePlan."""

    plan: Plan


@dataclass(frozen=True, eq=False)
class Predicted:
    """The answer to a Predict: `steps` [n, T] are left at each of the configured thresholds."""

    progress: tuple[Progress, ...]
    steps: np.ndarray


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Arrived
    | Cancelled
    | StepDone
    | NodeUp
    | NodeLost
    | RankUp
    | RankLost
    | RankFormed
    | RankLeft
    | LayoutWanted
    | Planned
    | Predicted
    | Tick
)

# ---- actions


@dataclass(frozen=True)
class Reject:
    """The request was never taken in; its submitter is told why."""

    request: int
    error: DlmServeError


@dataclass(frozen=True)
class Send:
    """To the leader of an instance."""

    instance: str
    command: Command


@dataclass(frozen=True)
class Predict:
    """How many steps are left at each of the configured thresholds? Answered by Predicted, soon."""

    progress: tuple[Progress, ...]


@dataclass(frozen=True)
class MakePlan:
    """Which layout serves this load best? Answered by Planned, within seconds, or not at all."""

    problem: Problem


class Deliver(msgspec.Struct, frozen=True):
    """`age_s`: since the request arrived."""

    request: int
    update: StepUpdate
    age_s: float


@dataclass(frozen=True)
class Finish:
    request: int
    reason: FinishReason
    summary: Summary


@dataclass(frozen=True)
class Fail:
    request: int
    error: DlmServeError


@dataclass(frozen=True)
class Drop:
    """A cancelled request is out of the books."""

    request: int
    outcome: CancelOutcome
    summary: Summary


@dataclass(frozen=True)
class FormInstance:
    """Make an instance of these ranks, in the order of their tp_rank. `recompute_tokens`: as in Form."""

    instance: str
    ranks: tuple[RankId, ...]
    recompute_tokens: int = 0


@dataclass(frozen=True)
class DissolveInstance:
    """`told`: its leader, who tells the others; if that is dead, the others. `lost`: nobody wanted this."""

    instance: str
    told: tuple[RankId, ...]
    reason: str
    lost: bool = True


@dataclass(frozen=True)
class RestartRank:
    """Kill this rank's process and start another for its device."""

    rank: RankId
    reason: str


Action = (
    Reject
    | Send
    | Predict
    | MakePlan
    | Deliver
    | Finish
    | Fail
    | Drop
    | FormInstance
    | DissolveInstance
    | RestartRank
)
