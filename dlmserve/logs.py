"""Log lines on stderr: for people, or one JSON object each. Knows nothing of what is logged.

What a line carries beside its text is given as `extra={...}`; the id of the HTTP request in whose context it
is written comes by itself. Prompts are not logged.
"""

import json
import logging
import sys
import time
from contextvars import ContextVar

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(log_format: str) -> None:
    """`log_format`: "text" | "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _fields(record: logging.LogRecord) -> dict:
    fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    current = request_id.get()
    return fields if current is None else {"request_id": current, **fields}


class TextFormatter(logging.Formatter):
    """12:00:01 text  key=value ..., with the level where it is not INFO."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{record.getMessage()}"
        pairs = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line += f"  {pairs}" if pairs else ""
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """{"time", "level", "logger", "message", "exception"?, ...fields}; time in seconds since 1970."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
