"""Every struct that crosses a process border, and its wire form (msgpack arrays, tagged).

Knows nothing about sockets, torch or scheduling. Instances are named once per formation (a name is
never used twice), so a message about a dead formation is recognised by its name alone.

Directions:   head -> rank    Form, Dissolve, Command (Admit, SetThreshold, SetRefresh, Release, Cancel),
                              Introduce, Shutdown
              rank -> head    RankHello, Formed, FormFailed, Dissolved, StepReport, Heartbeat
              head <-> agent  AgentHello, RankExited, NodeLeft, Heartbeat, RestartRank, Introduce, Shutdown
              leader -> follower  RunStep, Leave
"""

from typing import Literal

import msgspec

from dlmserve.errors import DlmServeError, NotFinite, OutOfPages, ProtocolError, WorkerError
from dlmserve.grid import Grid

PROTOCOL_VERSION = 5

CacheMode = Literal["none", "prefix", "dual"]
RuleName = Literal["threshold", "factor", "steps"]


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages; the class name is the tag."""


class Decoding(msgspec.Struct, array_like=True, frozen=True):
    """How one request is decoded; fixed for its life, but for the threshold.

    rule "threshold": unmask at confidence >= value; "factor": Fast-dLLM's factor rule with f = value;
    "steps": a fixed schedule of `value` steps per block.

    `block_causal` is the model's: a position sees its own block and earlier ones, never later ones. What is behind
    the current block is then never computed, and a finished block's K/V are final: "prefix" and "dual" are the same
    exact cache, and `refresh_blocks` means nothing.
    """

    block_length: int = 32
    cache: CacheMode = "dual"
    refresh_blocks: int = 1  # dual: the whole canvas every k-th block, only the response at the others
    rule: RuleName = "threshold"
    value: float = 0.9
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    seed: int = 0
    ignore_eos: bool = False
    num_top: int = 0  # alternatives to report for each unmasked token (logprobs)
    block_causal: bool = False
    max_block_steps: int = 0  # "threshold": each step unmasks its share of so many at least; 0: no bound

    @property
    def has_quota(self) -> bool:
        """Whether how many a step unmasks at least depends on how many steps of its block were done."""
        return self.rule == "steps" or self.max_block_steps > 0

    @property
    def grid(self) -> Grid:
        return Grid(self.block_length, self.block_causal)

    @property
    def needs_pages(self) -> bool:
        """Block-causal spans read their keys from pages also where nothing is kept from step to step."""
        return self.cache != "none" or self.block_causal


class Admit(Message, frozen=True):
    """Take a request: the canvas holds prompt, output (mask ids where masked) and suffix.

    Output positions are output_start .. output_end - 1; the answer is the first `limit` - output_start of
    them. A request that moved or was recovered carries what it had: its canvas and its step counters.
    """

    request: int
    canvas: list[int]
    output_start: int
    output_end: int
    limit: int
    decoding: Decoding
    steps_done: int = 0
    steps_in_block: int = 0


class SetThreshold(Message, frozen=True):
    """Takes effect at the request's next step; a request that is gone is ignored."""

    request: int
    threshold: float


class SetRefresh(Message, frozen=True):
    """`refresh_blocks` from the request's next block start on; a request that is gone is ignored."""

    request: int
    refresh_blocks: int


class Release(Message, frozen=True):
    """Give the request back at its next block start (where its cache would be rebuilt anyhow)."""

    request: int


class Cancel(Message, frozen=True):
    """Drop the request before the next step and free its pages."""

    request: int


Command = Admit | SetThreshold | SetRefresh | Release | Cancel


class RequestStep(msgspec.Struct, array_like=True, frozen=True):
    """What one denoising step did to one request; positions are canvas columns."""

    request: int
    recompute: bool
    block: int
    threshold: float  # the rule's value in this step
    positions: list[int]
    tokens: list[int]
    confidences: list[float]
    finished: Literal["", "stop", "length"] = ""  # "stop": an EOS with no mask before it
    top: list[list[tuple[int, float]]] | None = None  # per position: (token, log probability), best first
    masked_confidences: list[float] = []  # of the block's other positions, that stay masked
    hidden: tuple[float, float] | None = (
        None  # read from hidden states: blocks after this one, its steps left
    )


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why an instance has given a request up; all others go on.

    "not_finite": its logits are NaN or infinite; "no_pages": the KV pages could not hold it when it was
    admitted; "refused": it could not be admitted for another reason.
    """

    request: int
    kind: Literal["not_finite", "no_pages", "refused"]
    message: str

    @property
    def error(self) -> DlmServeError:
        """What the client is to be told."""
        kinds = {"not_finite": NotFinite, "no_pages": OutOfPages, "refused": WorkerError}
        return kinds[self.kind](self.message)


class StepReport(Message, frozen=True):
    """One denoising step of one instance."""

    instance: str
    seq: int
    duration_s: float
    idle_s: float  # between the end of the last step and the start of this one, while there was work
    num_tokens: int  # packed tokens of the step
    num_pages_in_use: int
    requests: list[RequestStep]
    released: list[int]
    failed: list[Failure]


class ModelSpec(msgspec.Struct, array_like=True, frozen=True):
    """What a rank must know to load the model; each node finds the folder itself."""

    path: str  # the head's
    load_format: Literal["auto", "dummy"]
    dtype: str  # "auto" | "float32" | "bfloat16" | "float16"
    mask_id: int
    eos_ids: list[int]
    name: str = ""  # alias, Hub id or folder, for a node where `path` is not
    fingerprint: str = ""  # of the head's copy; a node's must be the same


class Form(Message, frozen=True):
    """Make an instance of running ranks; sent to each of its ranks."""

    instance: str
    tp_rank: int
    tp_degree: int
    plan_endpoints: list[str]  # by tp_rank: where that rank listens for its leader
    key: str  # of this formation only, whichever head made it: names its rendezvous and its plans
    model: ModelSpec
    max_model_len: int
    max_num_seqs: int
    num_pages: int  # 0: as many as max_num_seqs full-length requests need (CPU) or as memory holds (GPU)
    page_size: int
    collective_timeout_s: float
    attention: str = "auto"  # the back end, see worker/attention
    memory_fraction: float = 0.9  # of a GPU's memory: weights, activations and KV pages together
    hidden_reader: str = ""  # file of a network that reads hidden states; "": none
    recompute_tokens: int = 0  # of a step's block starts together, at least one; 0: no limit


class Formed(Message, frozen=True):
    """One rank of the instance is ready to serve."""

    instance: str
    tp_rank: int
    num_pages: int
    load_s: float
    details: str  # for the log: kernel, attention, dtype, where the step times are from
    token_s: float  # of the warm-up step, per packed token: larger steps take less
    num_bytes_read: int  # of weights that the rank did not hold yet
    step_times: list[tuple[int, int, float]] = []  # (packed tokens, requests, seconds); the leader's


class FormFailed(Message, frozen=True):
    instance: str
    tp_rank: int
    error: str


class Dissolve(Message, frozen=True):
    """To the leader; it tells its followers. Residents are gone with it: the head holds their canvases."""

    instance: str


class Dissolved(Message, frozen=True):
    instance: str
    tp_rank: int
    error: str = ""  # why, where the instance broke instead of being asked to dissolve


class RankHello(Message, frozen=True):
    """A rank process is up and belongs to no instance."""

    version: int
    node: str
    device: int
    generation: int  # how often this device's process was started
    pid: int
    device_name: str  # "cpu" | "cuda:0"
    plan_endpoint: str


class RankExited(Message, frozen=True):
    node: str
    device: int
    generation: int
    reason: str


class AgentHello(Message, frozen=True):
    version: int
    node: str
    num_devices: int
    pid: int


class Heartbeat(Message, frozen=True):
    """From a rank (device >= 0) or an agent (device -1); the head answers agents with the same."""

    node: str
    device: int
    generation: int


class Introduce(Message, frozen=True):
    """From a head that does not know the peer (it may be another head than before): leave whatever you are
    in, and say hello."""


class NodeLeft(Message, frozen=True):
    """The node's agent ends, and its ranks with it."""

    node: str
    reason: str


class Shutdown(Message, frozen=True):
    """`reason`: why the peer is sent away; empty where everything ends."""

    reason: str = ""


class RestartRank(Message, frozen=True):
    """To an agent: kill this rank's process (it is silent or stuck) and start another for its device."""

    node: str
    device: int
    generation: int


class RunStep(Message, frozen=True):
    """Leader to followers: apply these commands, then run one step. All ranks hold the same state."""

    commands: list[Command]


class Leave(Message, frozen=True):
    """Leader to followers: the instance is dissolved."""


ToHead = (
    RankHello | RankExited | AgentHello | NodeLeft | Heartbeat | Formed | FormFailed | Dissolved | StepReport
)
ToPeer = Form | Dissolve | Command | Heartbeat | RestartRank | Introduce | Shutdown
ToFollower = RunStep | Leave

_encoder = msgspec.msgpack.Encoder()
_decoders = {
    "head": msgspec.msgpack.Decoder(ToHead),
    "peer": msgspec.msgpack.Decoder(ToPeer),
    "follower": msgspec.msgpack.Decoder(ToFollower),
}


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview, receiver: Literal["head", "peer", "follower"]) -> Message:
    """Raises ProtocolError for bytes that no message for this receiver has."""
    try:
        return _decoders[receiver].decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(
            f"{len(data)} bytes are no message for a {receiver} of protocol {PROTOCOL_VERSION}: {error}; "
            "are both ends of the same dlmserve version?"
        ) from error
