"""Keys of the links over TCP: made by `dlmserve keygen`, read by the head and by each node. CURVE (Curve25519).

Two files: head.key for the head, node.key for its nodes. Each holds its own secret key and the other's public
key, so whoever has neither can talk to nobody. Knows nothing of sockets.
"""

import json
import os
from pathlib import Path
from typing import Literal, NamedTuple

from dlmserve.errors import ConfigError

Role = Literal["head", "node"]


class Keys(NamedTuple):
    """Z85 text, 40 characters each; `peer`: the public key of the other end."""

    role: Role
    public: str
    secret: str
    peer: str


def generate(folder: str) -> list[Path]:
    """Writes head.key and node.key, readable by their owner only. Raises ConfigError; overwrites nothing."""
    import zmq

    pairs = {role: [key.decode() for key in zmq.curve_keypair()] for role in ("head", "node")}
    others: dict[Role, Role] = {"head": "node", "node": "head"}
    written = []
    for role, other in others.items():
        public, secret = pairs[role]
        path = Path(folder) / f"{role}.key"
        text = json.dumps(Keys(role, public, secret, pairs[other][0])._asdict(), indent=1) + "\n"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; choose a folder without keys"
            ) from error
        written.append(path)
    return written


def read(path: str, role: Role) -> Keys:
    """Raises ConfigError for a file that holds no keys, or those of the other end."""
    try:
        keys = Keys(**json.loads(Path(path).read_text(encoding="utf-8")))
        complete = all(isinstance(key, str) and len(key) == 40 for key in keys[1:])
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--keys {path} cannot be read: {error}; `dlmserve keygen` makes it") from error
    if keys.role != role or not complete:
        raise ConfigError(f"--keys {path} is for a {keys.role}; wanted the {role}.key of `dlmserve keygen`")
    return keys
