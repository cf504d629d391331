"""What the scheduler's tests tell their stories with: small requests, literal events, a check after each."""

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import RankId
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import (
    Action,
    Arrived,
    Event,
    Fail,
    Finish,
    NodeUp,
    RankFormed,
    RankUp,
    Reject,
    Send,
    StepDone,
)
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.policy.request import RequestSpec, Summary
from dlmserve.control.policy.scheduler import Scheduler
from dlmserve.errors import DlmServeError
from dlmserve.messages import Admit, Decoding, RequestStep, StepReport

MASK = 99
PAGE = BLOCK = 4
MAX_MODEL_LEN = 64


def make_spec(num_blocks: int = 1, name: str = "r", **fields) -> RequestSpec:
    """One page of prompt (1, 2, 3, 4), then `num_blocks` blocks of masks, one page each."""
    decoding = fields.pop("decoding", Decoding(block_length=BLOCK))
    canvas = [1, 2, 3, 4] + [MASK] * (BLOCK * num_blocks)
    return RequestSpec(name, canvas, PAGE, len(canvas), len(canvas), decoding, **fields)


def make_admit(request: int, spec: RequestSpec, canvas: list[int] | None = None, **fields) -> Admit:
    """The Admit of a request that had no step yet, unless told otherwise."""
    return Admit(
        request=request,
        canvas=spec.canvas if canvas is None else canvas,
        output_start=spec.output_start,
        output_end=spec.output_end,
        limit=spec.limit,
        decoding=fields.pop("decoding", spec.decoding),
        **fields,
    )


def make_step(request: int, tokens: dict[int, int], **fields) -> RequestStep:
    """`tokens`: what was unmasked, by position; confidence 0.5 everywhere."""
    return RequestStep(
        request=request,
        recompute=fields.pop("recompute", False),
        block=fields.pop("block", 0),
        threshold=fields.pop("threshold", 0.9),
        positions=list(tokens),
        tokens=list(tokens.values()),
        confidences=[0.5] * len(tokens),
        **fields,
    )


def make_report(instance: str, seq: int, *steps: RequestStep, **fields) -> StepReport:
    return StepReport(
        instance=instance,
        seq=seq,
        duration_s=0.01,
        idle_s=0.0,
        num_tokens=1,
        num_pages_in_use=0,
        requests=list(steps),
        released=fields.pop("released", []),
        failed=fields.pop("failed", []),
    )


def make_summary(**fields) -> Summary:
    values = {
        "steps": 0, "recompute_steps": 0, "num_unmasked": 0, "mean_threshold": None, "latency_s": 0.0,
        "slo_s": None, "slo_met": None, "instances": [],
    }  # fmt: skip
    return Summary(**(values | fields))


def admitted(actions: list) -> list[tuple[str, int]]:
    """(instance, request) of each Admit; the other actions are left out."""
    return [
        (a.instance, a.command.request)
        for a in actions
        if isinstance(a, Send) and isinstance(a.command, Admit)
    ]


def admit_of(actions: list) -> Admit:
    """Of a log that is nothing but one Admit."""
    [action] = actions
    assert isinstance(action, Send) and isinstance(action.command, Admit)
    return action.command


def summary_of(actions: list) -> Summary:
    """Of the request whose end comes last in the log."""
    assert isinstance(actions[-1], Finish)
    return actions[-1].summary


def error_of(actions: list) -> DlmServeError:
    """The error of the only Reject or Fail."""
    [action] = [action for action in actions if isinstance(action, Reject | Fail)]
    return action.error


class Story:
    """A scheduler whose invariants are checked after every event; policy infaas, unless told otherwise."""

    def __init__(self, costs: CostModel | None = None, asks_predictor: bool = False, **settings) -> None:
        self.config = ServerConfig(page_size=PAGE, **({"policy": "infaas"} | settings))
        self.scheduler = Scheduler(
            self.config, make_policy(self.config), MASK, MAX_MODEL_LEN, costs, asks_predictor
        )

    def at(self, now: float, event: Event) -> list[Action]:
        actions = self.scheduler.on_event(now, event)
        self.scheduler.check()
        return actions

    def arrive(self, now: float, request: int, spec: RequestSpec | None = None) -> list[Action]:
        return self.at(now, Arrived(request, spec or make_spec()))

    def report(self, now: float, instance: str, seq: int, *steps: RequestStep, **fields) -> list[Action]:
        return self.at(now, StepDone(make_report(instance, seq, *steps, **fields)))

    def start_ranks(self) -> list[Action]:
        """Node `n` comes up with as many devices as the layout needs; the formations that this starts."""
        actions = self.at(0.0, NodeUp("n", self.config.num_devices))
        for device in range(self.config.num_devices):
            actions += self.at(0.0, RankUp(rank(device), f"plan{device}"))
        return actions

    def form(self, instance: str, num_pages: int = 8, now: float = 0.0) -> list[Action]:
        """All ranks of the instance report that they are ready."""
        actions = []
        for tp_rank in range(self.scheduler.cluster.instances[instance].tp_degree):
            actions += self.at(now, RankFormed(instance, tp_rank, num_pages))
        return actions

    def serve(self, num_pages: int = 8) -> None:
        """The whole layout serves."""
        self.start_ranks()
        for instance in list(self.scheduler.cluster.instances):
            self.form(instance, num_pages)


def rank(device: int, generation: int = 1) -> RankId:
    return RankId("n", device, generation)
