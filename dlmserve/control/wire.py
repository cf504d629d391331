"""Between the wire and the state machine: messages become events, formations become Form messages.

Pure translation; knows neither sockets nor clocks.
"""

import secrets
from pathlib import Path

from dlmserve.checkpoint import ModelInfo, fingerprint
from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, RankId
from dlmserve.control.policy.events import (
    Event,
    FormInstance,
    NodeLost,
    NodeUp,
    RankFormed,
    RankLeft,
    RankLost,
    RankUp,
    StepDone,
)
from dlmserve.control.policy.step_times import StepTime
from dlmserve.messages import (
    AgentHello,
    Dissolved,
    Form,
    Formed,
    FormFailed,
    Heartbeat,
    ModelSpec,
    NodeLeft,
    RankExited,
    RankHello,
    StepReport,
    ToHead,
)

LOCAL_NODE = "local"  # the head's own machine; its processes end with it


def agent_identity(node: str) -> str:
    return f"{node}:agent"


def to_event(message: ToHead) -> Event | None:
    """None for a heartbeat: that concerns the clock only."""
    match message:
        case StepReport():
            return StepDone(message)
        case Formed(instance, tp_rank, num_pages):
            step_times = tuple(StepTime(*each) for each in message.step_times)
            return RankFormed(instance, tp_rank, num_pages, message.token_s, step_times)
        case FormFailed(instance, tp_rank, error) | Dissolved(instance, tp_rank, error):
            return RankLeft(instance, tp_rank, error)
        case RankHello():
            rank = RankId(message.node, message.device, message.generation)
            return RankUp(rank, message.plan_endpoint, message.pid)
        case RankExited(node, device, generation, reason):
            return RankLost(RankId(node, device, generation), reason, exited=True)
        case AgentHello():
            return NodeUp(message.node, message.num_devices)
        case NodeLeft(node, reason):
            return NodeLost(node, reason)
        case Heartbeat():
            return None


class FormMaker:
    """What every formation of this server has in common."""

    def __init__(self, config: ServerConfig, info: ModelInfo, hidden_reader: str) -> None:
        self._config, self._hidden_reader = config, hidden_reader
        self._life = secrets.token_hex(4)  # no other head names formations like this one
        self._max_model_len = config.max_model_len or info.max_model_len
        self._model = ModelSpec(
            path=info.path,
            load_format="dummy" if config.load_format == "dummy" else "auto",
            dtype=config.dtype,
            mask_id=info.mask_id,
            eos_ids=list(info.eos_ids),
            name=info.path if Path(config.model).is_dir() else config.model,
            fingerprint=fingerprint(info.path, with_weights=config.load_format != "dummy"),
        )

    def forms(self, action: FormInstance, cluster: Cluster) -> list[tuple[RankId, Form]]:
        """One Form per rank of the instance."""
        endpoints = [cluster.ranks[id[:2]].plan_endpoint for id in action.ranks]
        return [(id, self._form(action, tp_rank, endpoints)) for tp_rank, id in enumerate(action.ranks)]

    def _form(self, action: FormInstance, tp_rank: int, plan_endpoints: list[str]) -> Form:
        return Form(
            instance=action.instance,
            tp_rank=tp_rank,
            tp_degree=len(plan_endpoints),
            plan_endpoints=plan_endpoints,
            key=f"{self._life}-{action.instance}",
            model=self._model,
            max_model_len=self._max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            num_pages=0,
            page_size=self._config.page_size,
            collective_timeout_s=self._config.collective_timeout_s,
            attention=self._config.attention,
            memory_fraction=self._config.memory_fraction,
            hidden_reader=self._hidden_reader,
            recompute_tokens=action.recompute_tokens,
        )
