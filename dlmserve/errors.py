"""Every error dlmserve raises on purpose. Knows nothing of the rest of the package.

    DlmServeError
    ├── ConfigError            a flag, a key of the TOML file, a layout that does not fit the devices
    ├── CheckpointError        a model folder that cannot be used
    │   └── UnsupportedModel   an architecture without a model file here
    ├── RequestError           the request is wrong (HTTP 400); `param` names the field
    │   └── ContextTooLong     prompt + canvas exceed the model's context
    ├── QueueFull              try again later (HTTP 429)
    ├── Unavailable            draining, or no instance serves (HTTP 503)
    ├── NotFinite              the logits of one request are NaN or infinite (HTTP 500)
    ├── KernelsUnavailable     the CUDA kernels cannot be compiled or loaded here
    ├── NoPlan                 the planner found neither a layout nor the proof that there is none
    ├── ProtocolError          a message that does not belong to this protocol version
    └── WorkerError            an instance could not be formed, or was lost
        ├── OutOfPages         an admission that the KV pages cannot hold
        ├── OutOfMemory        a device whose memory does not hold what the instance needs
        └── DeviceLost         a device that does not work any more (in this process)

Messages follow one pattern: the value seen, the value wanted, what to do next.
"""


class DlmServeError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DlmServeError):
    """A setting that cannot be used."""


class CheckpointError(DlmServeError):
    """A model folder that cannot be used."""


class UnsupportedModel(CheckpointError):
    """The checkpoint's architecture has no model file in dlmserve."""


class RequestError(DlmServeError):
    """The request is wrong; `param` is the offending field (or None), `code` a machine-readable reason."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(RequestError):
    """Prompt plus canvas do not fit the model's context."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class QueueFull(DlmServeError):
    """As many requests wait as the server is willing to hold; `retry_after_s` is a suggestion."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(DlmServeError):
    """The server drains, or no model instance serves."""


class NotFinite(DlmServeError):
    """A request's logits are NaN or infinite."""


class KernelsUnavailable(DlmServeError):
    """The CUDA kernels cannot be compiled or loaded on this machine."""


class NoPlan(DlmServeError):
    """The planner's time ran out before it had an answer."""


class ProtocolError(DlmServeError):
    """Bytes that are no message of this protocol version."""


class WorkerError(DlmServeError):
    """A model instance could not be formed, or was lost."""


class OutOfPages(WorkerError):
    """An admission that the KV pages cannot hold: the scheduler's bookkeeping and the worker's differ."""


class OutOfMemory(WorkerError):
    """The device's memory does not hold what the instance needs; the device itself is fine."""


class DeviceLost(WorkerError):
    """The device raised an error after which this process cannot use it any more."""
