"""Which prompts a step predictor learns from: a file's, the model folder's own, or a few that come with dlmserve.

Owns the search and the file's form: JSON lines, each with "prompt" (text) or "messages" (a chat). Knows nothing of
what is done with them.
"""

import json
from pathlib import Path

from dlmserve.errors import ConfigError, RequestError
from dlmserve.tokenizer import Tokenizer

OF_THE_MODEL = "prompts.jsonl"  # in the model's folder
# For a model without prompts of its own: short and long answers, prose, lists, code, numbers.
TOPICS = [
    "photosynthesis", "the French Revolution", "compound interest", "how vaccines work", "plate tectonics",
    "the water cycle", "supply and demand", "black holes", "the Silk Road", "sourdough bread", "sleep",
    "recycling", "chess openings", "the internet", "jazz", "electric cars", "volcanoes", "the Olympic Games",
    "bees", "public libraries",
]  # fmt: skip
FORMS = [
    "What is {} about? Answer in one sentence.",
    "Explain {} to a ten-year-old in about 100 words.",
    "Give five key facts about {} as a numbered list.",
    "Write a Python dictionary with three facts about {}.",
    "Name one person connected with {}. Only the name.",
    "Write a short dialogue of two friends about {}.",
    "Is {} older than 100 years? Answer yes or no.",
]


def load_prompts(path: str | None, model_folder: str) -> tuple[list[list[dict[str, str]]], str]:
    """Chats, and where they are from. Raises ConfigError for a file that cannot be used."""
    if path:
        return _read(Path(path)), path
    own = Path(model_folder) / OF_THE_MODEL
    if own.exists():
        return _read(own), str(own)
    # Forms vary fastest, and every topic meets every form: any first part of the list is varied.
    num = len(TOPICS) * len(FORMS)
    texts = [FORMS[i % len(FORMS)].format(TOPICS[i % len(TOPICS)]) for i in range(num)]
    return [_chat(text) for text in texts], "dlmserve's own list"


def encode_prompts(chats: list[list[dict[str, str]]], tokenizer: Tokenizer) -> list[list[int]]:
    """A base model, which has no chat template, completes the last message's text."""
    try:
        return [tokenizer.encode_chat(chat) for chat in chats]
    except RequestError:
        return [tokenizer.encode_prompt(chat[-1]["content"]) for chat in chats]


def _read(path: Path) -> list[list[dict[str, str]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts file {path} cannot be read: {error}") from error
    chats = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not chats:
        raise ConfigError(
            f"prompts file {path} is empty; wanted JSON lines, each with 'prompt' or 'messages'"
        )
    return chats


def _parse(line: str, where: str) -> list[dict[str, str]]:
    try:
        record = json.loads(line)
        if "prompt" in record:
            return _chat(_text(record["prompt"]))
        return [
            {"role": _text(each["role"]), "content": _text(each["content"])} for each in record["messages"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} is {line[:60]!r}; wanted an object with 'prompt' (text) or 'messages' (role, content)"
        ) from error


def _chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is no text")
    return value
