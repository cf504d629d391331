"""Text to tokens and back, without transformers: tokenizer.json, the chat template, incremental detokenising.

Special tokens in a user's text are plain text here: a prompt holding "<|mdm_mask|>" must not put a mask on
the canvas. The chat template's own special tokens are real ones.
"""

import re
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from dlmserve.checkpoint import read_json
from dlmserve.errors import CheckpointError, RequestError

MAX_PENDING = 12  # tokens held back, hoping that they complete a character
REPLACEMENT = "\ufffd"  # what an incomplete UTF-8 sequence decodes to
# Breaks a special token spelled out in a user's content while the template is rendered.
BREAK = "\x00"


class Tokenizer:
    """The tokenizer of a model folder. Raises CheckpointError where the folder has none."""

    def __init__(self, folder: str) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path} is missing: serving text needs the checkpoint's tokenizer.json")
        self._fast = FastTokenizer.from_file(str(path))
        # The same tokenizer without its special tokens' matching: for text that users wrote.
        self._plain = FastTokenizer.from_file(str(path))
        self._plain.encode_special_tokens = True
        config = read_json(folder, "tokenizer_config.json")
        self._special = {
            k: _content(config[k]) for k in ("bos_token", "eos_token", "pad_token") if config.get(k)
        }
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = {token.content: id for id, token in added.items() if token.special}
        names = "|".join(map(re.escape, self._special_ids))
        self._special_pattern = re.compile(f"({names})") if names else None
        self._is_byte_level = "ByteLevel" in str(self._fast.decoder)
        self._template = _load_template(folder, config)
        bos = self._special.get("bos_token")
        self.bos_id: int | None = self._fast.token_to_id(bos) if bos else None
        self.add_bos = bool(config.get("add_bos_token", False))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled out in it are not recognised."""
        # The batch call releases the GIL, which matters where a long prompt is encoded in a thread.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def encode_prompt(self, text: str) -> list[int]:
        """A completion prompt: plain text, after the start token where the checkpoint adds one or text is empty."""
        ids = self.encode(text)
        if self.bos_id is not None and (self.add_bos or not ids):
            return [self.bos_id, *ids]
        if not ids:
            raise RequestError(
                "the prompt is empty and this model has no start token; give at least one token", "prompt"
            )
        return ids

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, up to where the answer begins.

        Raises RequestError where the checkpoint has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        from jinja2.exceptions import TemplateError

        safe = [{**m, "content": self._break_special(m["content"])} for m in messages]
        try:
            text = self._template.render(messages=safe, add_generation_prompt=True, **self._special)
        except TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        ids: list[int] = []
        for i, piece in enumerate(self._special_pattern.split(text) if self._special_pattern else [text]):
            if i % 2:  # a special token of the template
                ids.append(self._special_ids[piece])
            else:
                ids.extend(self.encode(piece.replace(BREAK, "")))
        return ids

    def _break_special(self, content: str) -> str:
        content = content.replace(BREAK, "")
        if self._special_pattern is None:
            return content
        return self._special_pattern.sub(lambda m: m[0][0] + BREAK + m[0][1:], content)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out."""
        return self._fast.decode(ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token as text (special tokens by name): for logprobs and unmask events."""
        return self._fast.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> list[int]:
        """The bytes of one token, which may be a part of a character (byte-level vocabularies)."""
        piece = self._fast.id_to_token(token_id) or ""
        if self._is_byte_level and all(char in BYTE_OF for char in piece):
            return [BYTE_OF[char] for char in piece]
        return list(self.token_text(token_id).encode())


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_level_alphabet()


class Detokenizer:
    """Text of a growing token sequence; each call returns what became certain, append-only.

    A token can end inside a UTF-8 character: text ending in U+FFFD is held back until a later token completes
    it, or `flush()` gives it up as it is. Decodes from a few tokens back only, so the cost does not grow.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context_start = 0  # decoding starts here: one stable piece before what is new
        self._stable_end = 0  # tokens before this are out as text

    def push(self, ids: list[int]) -> str:
        self._ids.extend(ids)
        text = self._new_text()
        if text and not text.endswith(REPLACEMENT):
            self._settle(len(self._ids))
            return text
        return self._give_up_old() if len(self._ids) - self._stable_end > MAX_PENDING else ""

    def flush(self) -> str:
        """What is still held back, as it is."""
        text = self._new_text()
        self._context_start = self._stable_end = len(self._ids)
        return text

    def _give_up_old(self) -> str:
        """Bytes that never make a character (a random model's) are final but for the last few of them.

        An unfinished character has at most three bytes; a cut before it leaves both sides' text as it is.
        """
        known = self._decode(self._context_start, self._stable_end)
        whole, end = self._decode(self._context_start, len(self._ids)), len(self._ids)
        for cut in range(end - 3, end - 7, -1):
            head = self._decode(self._context_start, cut)
            if head + self._decode(cut, end) == whole:
                self._settle(cut)
                return head[len(known) :]
        return ""

    def _settle(self, end: int) -> None:
        self._context_start, self._stable_end = self._stable_end, end

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end])

    def _new_text(self) -> str:
        known = self._decode(self._context_start, self._stable_end)
        return self._decode(self._context_start, len(self._ids))[len(known) :]


def _content(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


def _load_template(folder: str, config: dict):  # noqa: ANN202  (a jinja2 type, imported lazily)
    source = config.get("chat_template")
    file = Path(folder) / "chat_template.jinja"
    if file.exists():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):  # several named templates
        source = next((t["template"] for t in source if t["name"] == "default"), None)
    if not source:
        return None
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _raise(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
