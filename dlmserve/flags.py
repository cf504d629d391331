"""The flags of `serve` and the keys of its TOML file: one table for both. Makes a ServerConfig of them.

Owns names, help texts and how a value is read from text. What a value may be is config.py's.
"""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from dlmserve.config import ServerConfig
from dlmserve.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


def read_integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def read_numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


@dataclass(frozen=True)
class Flag:
    """`read` turns text into the value of the ServerConfig field `field`; `wanted` says what text that is."""

    name: str  # without dashes
    field: str
    group: str
    help: str
    metavar: str
    read: Callable[[str], Any] = str
    wanted: str = "text"
    read_all: Callable[[list[str]], Any] | None = None  # of a flag that may be repeated: all its texts

    @property
    def repeatable(self) -> bool:
        return self.read_all is not None

    def parse(self, text: str) -> Any:
        """Raises ConfigError."""
        try:
            return self.read(text)
        except ValueError as error:
            raise ConfigError(f"--{self.name} is '{text}'; wanted {self.wanted}") from error


def _flag(group: str, field: str, metavar: str, help: str, **more: Any) -> Flag:
    return Flag(field.replace("_", "-"), field, group, help, metavar, **more)


_INTEGER: dict[str, Any] = {"read": int, "wanted": "an integer"}
_NUMBER: dict[str, Any] = {"read": float, "wanted": "a number"}

POLICY_NAMES = "infaas|llumnix|proteus|star|tediserve|dlmserve"

FLAGS = [
    _flag("model", "model", "NAME", "alias (tiny, llada-8b, dream-7b, ...), Hugging Face id, or folder"),
    _flag("model", "load_format", "auto|dummy", "dummy: random weights, no checkpoint read"),
    _flag("model", "dtype", "NAME", "auto, float32, bfloat16 or float16"),
    _flag("model", "max_model_len", "N", "most tokens of prompt + canvas (default: the model's)", **_INTEGER),
    _flag("devices", "device", "auto|cpu|cuda", "where the ranks run"),
    _flag(
        "devices", "devices", "N", "GPUs, or ranks on the CPU (default: what the layout needs)", **_INTEGER
    ),
    _flag(
        "devices",
        "tp_layout",
        "1,1,2",
        "one TP degree per model instance",
        read=read_integers,
        wanted="TP degrees with commas between them, e.g. 1,1,2",
    ),
    _flag("devices", "max_num_seqs", "N", "requests at once, per instance", **_INTEGER),
    _flag("devices", "page_size", "N", "tokens in a page of KV memory", **_INTEGER),
    _flag("devices", "memory_fraction", "X", "part of each GPU's memory that a rank may fill", **_NUMBER),
    _flag("devices", "attention", "NAME", "auto, flash, varlen or sdpa"),
    _flag("nodes", "listen", "tcp://ADDRESS:PORT", "where other nodes join (default: nowhere)"),
    _flag("nodes", "keys", "FILE", "head.key, made by `dlmserve keygen`; needed beyond loopback"),
    _flag("decoding", "block_length", "N", "default block length (default: the model's, or 32)", **_INTEGER),
    _flag(
        "decoding",
        "thresholds",
        "0.9,0.8,...",
        "thresholds that the server may choose from",
        read=read_numbers,
        wanted="numbers with commas between them, e.g. 0.9,0.8",
    ),
    _flag("decoding", "cache", "none|prefix|dual", "KV caching within a block"),
    _flag("decoding", "refresh", "full|response:K", "what a block's first step computes"),
    _flag("decoding", "slo_ms", "MS", "latency SLO of requests that name none (default: none)", **_NUMBER),
    _flag("scheduling", "policy", POLICY_NAMES, "who runs where, with which threshold"),
    Flag(
        "policy-option",
        "policy_options",
        "scheduling",
        "a setting of the policy, 0 to switch a part of it off; repeatable",
        "NAME=X",
        read_all=lambda texts: _read_options(texts),
    ),
    _flag("scheduling", "step_predictor", "FOLDER", "what train-predictor made (default: the model's own)"),
    _flag(
        "scheduling",
        "step_predictor_kind",
        "NAME",
        "auto, history, catboost, hidden or catboost+hidden; auto: the best of what is there",
    ),
    _flag(
        "scheduling",
        "max_resident_tokens",
        "N",
        "most tokens of all canvases on an instance (default: the policy's limit)",
        **_INTEGER,
    ),
    Flag(
        "reconfigure-every",
        "reconfigure_every_s",
        "scheduling",
        "ask the planner for a layout so often, and change to it where that pays (default: off)",
        "S|off",
        read=lambda text: None if text == "off" else float(text),
        wanted="a number of seconds, or off",
    ),
    _flag(
        "scheduling",
        "tp_degrees",
        "1,2,4",
        "TP degrees that a planned layout may have",
        read=read_integers,
        wanted="TP degrees with commas between them, e.g. 1,2,4",
    ),
    _flag("scheduling", "workload_window_s", "S", "how much of the past the planner looks at", **_NUMBER),
    _flag("http", "host", "ADDRESS", "address to listen on"),
    _flag("http", "port", "N", "port to listen on; 0: any free one", **_INTEGER),
    _flag("http", "served_model_name", "NAME", "the model's name in the API (default: --model)"),
    Flag(
        "api-key",
        "api_keys",
        "http",
        "key that clients must send, or @FILE with one a line; repeatable",
        "KEY",
        read_all=lambda texts: _read_keys("--api-key", texts),
    ),
    Flag(
        "admin-key",
        "admin_keys",
        "http",
        "key that changes of the cluster need, or @FILE with one a line; repeatable",
        "KEY",
        read_all=lambda texts: _read_keys("--admin-key", texts),
    ),
    _flag("http", "max_queue", "N", "requests that may wait; more are answered 429", **_INTEGER),
    _flag("operation", "drain_s", "S", "time to finish what runs after SIGTERM", **_NUMBER),
    _flag("operation", "log_format", "text|json", "log lines for people or for machines"),
    _flag("operation", "heartbeat_timeout_s", "S", "silence after which a rank counts as dead", **_NUMBER),
    _flag(
        "operation", "collective_timeout_s", "S", "time after which a collective counts as hung", **_NUMBER
    ),
    _flag(
        "operation",
        "step_timeout_s",
        "S",
        "time without a step after which a busy instance counts as hung, if its steps cannot be longer",
        **_NUMBER,
    ),
    _flag("operation", "run_dir", "FOLDER", "where the processes' sockets are (default: a fresh one)"),
]
_DEFAULTS = {each.name: None if each.default is MISSING else each.default for each in fields(ServerConfig)}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors and name the nearest known flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        for word in unknown:
            name = word.split("=")[0]
            if name.startswith("-"):
                raise ConfigError(unknown_name("flag", name, self._option_string_actions))
        if unknown:
            raise ConfigError(f"unexpected argument '{unknown[0]}'; see {self.prog} --help")
        return args


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The error text for a name that nobody knows."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}"
    return f"unknown {what} '{name}'; {hint}"


def add_flags(parser: Parser) -> None:
    """All flags in their groups; those not given are absent from the namespace."""
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(flag.group for flag in FLAGS)}
    for flag in FLAGS:
        default = _DEFAULTS[flag.field]
        if isinstance(default, tuple):
            default = ",".join(map(str, default))
        shown = f" (default: {default})" if default not in (None, "") else ""
        groups[flag.group].add_argument(
            f"--{flag.name}",
            dest=flag.field,
            metavar=flag.metavar,
            help=flag.help + shown,
            action="append" if flag.repeatable else "store",
            default=argparse.SUPPRESS,
        )
    groups["operation"].add_argument(
        "--config", metavar="FILE.toml", help="settings by flag name; flags win over it"
    )


def make_config(args: argparse.Namespace) -> ServerConfig:
    """From parsed flags and the file that they name. Raises ConfigError for what cannot be."""
    given = _read_file(args.config) if args.config else {}
    given |= {flag.field: vars(args)[flag.field] for flag in FLAGS if flag.field in args}
    values = {}
    for flag in FLAGS:
        if flag.field not in given:
            continue
        text = given[flag.field]
        values[flag.field] = flag.read_all(text) if flag.read_all else flag.parse(text)
    config = ServerConfig(**values)
    config.check()
    return config


def _read_file(path: str) -> dict[str, Any]:
    """Values by field, as the text that a flag would have: TOML's lists become commas."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path} cannot be read as TOML: {error}") from error
    known = {flag.name: flag for flag in FLAGS}
    texts = {}
    for key, value in data.items():
        flag = known.get(key.replace("_", "-"))
        if flag is None:
            raise ConfigError(f"{path}: " + unknown_name("key", key, known))
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str | int | float) and not isinstance(part, bool) for part in parts):
            raise ConfigError(f"{path}: {key} is {value}; wanted {flag.wanted}")
        texts[flag.field] = list(map(str, parts)) if flag.repeatable else ",".join(map(str, parts))
    return texts


def _read_options(texts: list[str]) -> dict[str, float]:
    """NAME=X to {NAME: X}. Which names there are is the policy's business."""
    options = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            options[name.strip().replace("-", "_")] = float(value)
        except ValueError as error:
            raise ConfigError(f"--policy-option is '{text}'; wanted NAME=NUMBER, e.g. moves=0") from error
    return options


def _read_keys(name: str, texts: list[str]) -> tuple[str, ...]:
    """Keys; "@FILE" stands for the lines of that file."""
    keys: list[str] = []
    for text in texts:
        if not text.startswith("@"):
            keys.append(text)
            continue
        try:
            keys += Path(text[1:]).read_text(encoding="utf-8").split()
        except OSError as error:
            raise ConfigError(f"{name} {text} cannot be read: {error}") from error
    if not all(keys) or not keys:
        raise ConfigError(f"{name} is empty; wanted a key, or @FILE with one key a line")
    return tuple(keys)
