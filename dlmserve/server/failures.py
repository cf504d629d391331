"""Errors as a client sees them: OpenAI's error object, the status and the headers of each exception.

Owns the mapping and nothing else. Messages of unforeseen exceptions stay in the log.
"""

from dataclasses import dataclass, field

from aiohttp import web

from dlmserve.errors import DlmServeError, NotFinite, OutOfPages, QueueFull, RequestError, Unavailable


@dataclass(frozen=True)
class Failure:
    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class WrongKey(DlmServeError):
    """No API key, or a wrong one (HTTP 401)."""


def describe(error: Exception) -> Failure:
    """Status, body and headers for any exception."""
    match error:
        case WrongKey():
            headers = {"WWW-Authenticate": "Bearer"}
            return Failure(401, str(error), "authentication_error", "invalid_api_key", headers=headers)
        case RequestError():
            status = 404 if error.code == "model_not_found" else 400
            return Failure(status, str(error), "invalid_request_error", error.code, error.param)
        case QueueFull():
            headers = {"Retry-After": str(error.retry_after_s)}
            return Failure(429, str(error), "rate_limit_error", "queue_full", headers=headers)
        case Unavailable() | OutOfPages():
            return Failure(503, str(error), "server_error", "unavailable", headers={"Retry-After": "5"})
        case NotFinite():
            return Failure(500, str(error), "server_error", "not_finite")
        case DlmServeError():
            return Failure(500, str(error), "server_error", "worker_error")
        case web.HTTPException():
            return _of_http(error)
    return Failure(
        500,
        "an internal error; the server's log has it under this x-request-id",
        "server_error",
        "internal_error",
    )


def _of_http(error: web.HTTPException) -> Failure:
    """What aiohttp raises by itself: no such route, wrong method, body too large."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    match error:
        case web.HTTPRequestEntityTooLarge():
            return Failure(413, f"{error.text}; send a smaller body", kind, "body_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"method {error.method} is not allowed here; wanted {allowed}"
            return Failure(405, message, kind, "method_not_allowed", headers={"Allow": allowed})
        case web.HTTPNotFound():
            return Failure(
                404, "no such route; see POST /v1/chat/completions, GET /v1/models", kind, "not_found"
            )
    return Failure(error.status, error.reason, kind, None)
