"""Options of a config.json that change what a model computes: those that are served, all others refused."""

from typing import Any

from dlmserve.errors import CheckpointError


def check_options(config: dict, served: dict[str, Any], model: str) -> None:
    """Raises CheckpointError for the first key with another value; what is absent, null or off is all the same."""
    for key, wanted in served.items():
        value = config.get(key)
        if value is not None and value != wanted and (value or wanted):
            raise CheckpointError(f"config.json has {key}={value!r}; {model} is served with {key}={wanted!r}")
