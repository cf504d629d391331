"""Reads the fields of a JSON object one by one, each with the values it may have.

Owns the wording of "this field has that value, wanted was this". Knows no field of any API.
Null and absent mean the same, as in OpenAI's API.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dlmserve.errors import RequestError


class Fields:
    """A JSON object being read; `close()` then refuses whatever nobody asked for."""

    def __init__(self, raw: object, path: str = "") -> None:
        """`path` names the object itself in errors ("" for the request body)."""
        if not isinstance(raw, dict):
            raise RequestError(f"{path or 'the body'} is {shown(raw)}; wanted a JSON object", path or None)
        self._raw = raw
        self.path = path
        self._known: list[str] = []

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str, wanted: str, accepts: Callable[[Any], bool]) -> Any:
        """The field's value, None where it is absent or null. Raises RequestError where `accepts` says no."""
        self._known.append(key)
        value = self._raw.get(key)
        if value is not None and not accepts(value):
            raise RequestError(f"{self.name(key)} is {shown(value)}; wanted {wanted}", self.name(key))
        return value

    def required(self, key: str, wanted: str, accepts: Callable[[Any], bool]) -> Any:
        """As `get`, for a field that must be there."""
        value = self.get(key, wanted, accepts)
        if value is None:
            raise RequestError(f"{self.name(key)} is missing; wanted {wanted}", self.name(key))
        return value

    def any(self, key: str) -> Any:
        return self.get(key, "anything", lambda value: True)

    def boolean(self, key: str) -> bool:
        """False where absent."""
        return bool(self.get(key, "true or false", lambda value: isinstance(value, bool)))

    def integer(self, key: str, least: int, most: int) -> int | None:
        wanted = f"an integer from {least} to {most}"
        return self.get(key, wanted, lambda value: is_integer(value) and least <= value <= most)

    def number(self, key: str, wanted: str, accepts: Callable[[float], bool]) -> float | None:
        value = self.get(key, wanted, lambda value: is_number(value) and accepts(value))
        return None if value is None else float(value)

    def choice(self, key: str, options: Sequence[str]) -> str | None:
        return self.get(key, "one of: " + ", ".join(options), lambda value: value in options)

    def string(self, key: str) -> str | None:
        return self.get(key, "a string", lambda value: isinstance(value, str))

    def neutral(self, key: str, *values: object) -> None:
        """A field that is not supported, but for the values that ask for nothing."""
        names = " or ".join(shown(value) for value in values) or "null"
        self.get(
            key, f"{names}, or the field left out: it is not supported here", lambda value: value in values
        )

    def close(self) -> None:
        """Raises RequestError naming the fields that nobody asked for, and the nearest known ones."""
        unknown = [key for key in self._raw if key not in self._known]
        if not unknown:
            return
        hints = []
        for key in unknown[:5]:
            near = difflib.get_close_matches(key[:100], self._known, n=1)
            hints.append(f"{shown(self.name(key))}" + (f" (did you mean '{near[0]}'?)" if near else ""))
        noun = "field" if len(unknown) == 1 else "fields"
        known = ", ".join(sorted(self._known))
        raise RequestError(f"unknown {noun} {', '.join(hints)}; known: {known}", self.name(unknown[0])[:100])


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value as JSON, for an error message: short, whatever the client sent."""
    text = msgspec.json.encode(value, order="deterministic").decode()
    return text if len(text) <= 80 else text[:77] + "..."
