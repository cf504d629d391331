"""Between the wire and the state machine: messages become events, formations become Form messages.

Pure translation; knows neither sockets nor clocks.
"""

from dlmserve.checkpoint import ModelInfo
from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, RankId
from dlmserve.control.policy.events import (
    Event,
    FormInstance,
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
    RankExited,
    RankHello,
    StepReport,
    ToHead,
)


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
            return RankUp(RankId(message.node, message.device, message.generation), message.plan_endpoint)
        case RankExited(node, device, generation, reason):
            return RankLost(RankId(node, device, generation), reason, exited=True)
        case AgentHello():
            return NodeUp(message.node, message.num_devices)
        case Heartbeat():
            return None


class FormMaker:
    """What every formation of this server has in common."""

    def __init__(self, config: ServerConfig, info: ModelInfo, run_dir: str, hidden_reader: str) -> None:
        self._config, self._run_dir, self._hidden_reader = config, run_dir, hidden_reader
        self._max_model_len = config.max_model_len or info.max_model_len
        self._model = ModelSpec(
            path=info.path,
            load_format="dummy" if config.load_format == "dummy" else "auto",
            dtype=config.dtype,
            mask_id=info.mask_id,
            eos_ids=list(info.eos_ids),
        )

    def forms(self, action: FormInstance, cluster: Cluster) -> list[tuple[RankId, Form]]:
        """One Form per rank of the instance."""
        endpoints = [cluster.ranks[id[:2]].plan_endpoint for id in action.ranks]
        return [
            (id, self._form(action.instance, tp_rank, endpoints)) for tp_rank, id in enumerate(action.ranks)
        ]

    def _form(self, instance: str, tp_rank: int, plan_endpoints: list[str]) -> Form:
        return Form(
            instance=instance,
            tp_rank=tp_rank,
            tp_degree=len(plan_endpoints),
            plan_endpoints=plan_endpoints,
            store_path=f"{self._run_dir}/{instance}.store",
            model=self._model,
            max_model_len=self._max_model_len,
            max_num_seqs=self._config.max_num_seqs,
            num_pages=0,
            page_size=self._config.page_size,
            collective_timeout_s=self._config.collective_timeout_s,
            attention=self._config.attention,
            memory_fraction=self._config.memory_fraction,
            hidden_reader=self._hidden_reader,
        )
