"""The tokenizer's part of a GGUF header, checked before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from asyncengine.errors import ModelNotFound, shorten

PREFIX = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
HUGGINGFACE_KEY = "tokenizer.huggingface.json"
SPACE = "\u2581"
"""The character that stands for a space in SentencePiece's vocabularies, and before words in BERT's."""

MAX_TOKENS = 1_000_000
MAX_ADDED_TOKENS = 100_000
MAX_MERGES = 4_000_000
MAX_TOKEN_CHARS = 2_048
MAX_VOCABULARY_CHARS = 8_000_000
MAX_MERGES_CHARS = 64_000_000
MAX_TEMPLATES = 64
MAX_TEMPLATE_CHARS = 1_000_000
MAX_HUGGINGFACE_CHARS = 64_000_000
"""Bounds on what a header may hold. The largest vocabularies there are have 262,144 tokens of 2 million characters and
514,906 merges; the most control and user-defined tokens are 6,670."""
NO_ID = 0xFFFF_FFFF
"""The id by which some writers say that there is no such token."""

ID_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "cls": "cls_token_id", "sep": "seperator_token_id",
}  # fmt: skip
"""Short names, and the format's keys (whose spelling of "separator" is the format's)."""
LLAMA_IDS = {"unk": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}
"""Tokens of the kind "llama" that headers of 2023 do not name."""
TokenType = IntEnum("TokenType", "UNDEFINED NORMAL UNKNOWN CONTROL USER_DEFINED UNUSED BYTE", start=0)
"""Types of tokens, in the numbers of `tokenizer.ggml.token_type`."""


class TokenizerHeader:
    """The values of a tokenizer, of the right types and within bounds.

    `tokens[i]` has the id `i`, `types[i]` (NORMAL where the file has none) and, if there are any, `scores[i]`. `ids`
    holds those special ids (keys of `ID_KEYS`) that the file names, `huggingface` a whole tokenizer.json, which few
    files have. A flag that is missing is None.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Raises `ModelNotFound` naming the key that is missing, of the wrong type, too long, or that contradicts
        another."""
        self._metadata = metadata
        if metadata.get(PREFIX + "model") is None:
            raise broken(PREFIX + "model", "is missing")
        self.model, self.pre = self._text(PREFIX + "model"), self._text(PREFIX + "pre")
        self.architecture = self._text("general.architecture")
        self.is_gemma = self.architecture.startswith("gemma")
        self.tokens = self._tokens()
        self.types = self._types()
        self.scores: list[float] = self._array(PREFIX + "scores", MAX_TOKENS, float, "numbers")
        if not all(map(math.isfinite, self.scores)):
            raise broken(PREFIX + "scores", "holds a number that is not finite")
        for key, values in (("token_type", self.types), ("scores", self.scores)):
            if values and len(values) != len(self.tokens):
                raise broken(PREFIX + key, f"has {len(values)} entries for {len(self.tokens)} tokens")
        self.merges = self._merges()
        self.ids = self._ids()
        self.add_bos, self.add_eos = self._flag("add_bos_token"), self._flag("add_eos_token")
        self.space_prefix = self._flag("add_space_prefix")
        self.lowercase, self.strip_accents = (
            self._flag(f"normalizer.{name}") for name in ("lowercase", "strip_accents")
        )
        self.chat_templates = self._templates()
        self.huggingface = self._text(HUGGINGFACE_KEY, MAX_HUGGINGFACE_CHARS)

    def name_of(self, which: str) -> str | None:
        """The token named bos, eos, ... (a key of `ID_KEYS`), if the file has one."""
        return self.tokens[self.ids[which]] if which in self.ids else None

    def spelled(self) -> list[str]:
        """The tokens as the vocabulary spells them: converters write Gemma's user-defined runs of spaces as spaces."""
        if not self.is_gemma:
            return self.tokens
        typed = zip(self.tokens, self.types, strict=True)
        return [name.replace(" ", SPACE) if type_ == TokenType.USER_DEFINED else name for name, type_ in typed]

    def _tokens(self) -> list[str]:
        key = PREFIX + "tokens"
        tokens = self._strings(key, MAX_TOKENS, MAX_VOCABULARY_CHARS)
        if not tokens:
            raise broken(key, "is missing or empty")
        # tokens without a name get the ones that other readers of the format give
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        longest = max(map(len, tokens))
        if longest > MAX_TOKEN_CHARS:
            raise broken(key, f"holds a token of {longest} characters, the limit is {MAX_TOKEN_CHARS}")
        if len(ids := {token: index for index, token in enumerate(tokens)}) != len(tokens):
            index, token = next(entry for entry in enumerate(tokens) if ids[entry[1]] != entry[0])
            second = tokens.index(token, index + 1)
            raise broken(key, f"holds {shorten(repr(token), 40)} twice, as {index} and {second}")
        return tokens

    def _types(self) -> list[int]:
        key = PREFIX + "token_type"
        types = self._array(key, MAX_TOKENS, int, "whole numbers") or [int(TokenType.NORMAL)] * len(self.tokens)
        for unknown in set(types).difference(TokenType):
            names = ", ".join(f"{token_type.value} ({token_type.name.lower()})" for token_type in TokenType)
            raise broken(key, f"holds {unknown} at token {types.index(unknown)}; known are {names}")
        added = sum(map(types.count, (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)))
        if added > MAX_ADDED_TOKENS:
            raise broken(key, f"marks {added} tokens as control or user-defined, the limit is {MAX_ADDED_TOKENS}")
        return types

    def _merges(self) -> list[tuple[str, str]]:
        key = PREFIX + "merges"
        merges = []
        for index, merge in enumerate(self._strings(key, MAX_MERGES, MAX_MERGES_CHARS)):
            cut = merge.find(" ", 1)  # the left part may itself begin with a space
            if cut < 1 or cut + 1 == len(merge):
                raise broken(key, f"holds {shorten(repr(merge), 60)} at {index}, which is no pair of tokens")
            merges.append((merge[:cut], merge[cut + 1 :]))
        return merges

    def _ids(self) -> dict[str, int]:
        ids = {}
        for name, short in ID_KEYS.items():
            value = self._metadata.get(PREFIX + short)
            if value is None or value == NO_ID:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise broken(PREFIX + short, f"is {shorten(repr(value), 40)}, not a token's id")
            if not 0 <= value < len(self.tokens):
                raise broken(PREFIX + short, f"is {value}, outside the vocabulary of {len(self.tokens)} tokens")
            ids[name] = value
        if self.model == "llama":
            for name, (index, token) in LLAMA_IDS.items():
                if index < len(self.tokens) and self.tokens[index] == token:
                    ids.setdefault(name, index)
        return ids

    def _templates(self) -> dict[str, str]:
        """Chat templates by name; the one without a name is called "default", as transformers calls it."""
        keys = [key for key in self._metadata if key == TEMPLATE_KEY or key.startswith(TEMPLATE_KEY + ".")]
        if len(keys) > MAX_TEMPLATES:
            raise broken(TEMPLATE_KEY, f"comes in more than {MAX_TEMPLATES} forms")
        texts = {key.removeprefix(TEMPLATE_KEY)[1:] or "default": self._text(key, MAX_TEMPLATE_CHARS) for key in keys}
        return {name: text for name, text in texts.items() if text}

    def _text(self, key: str, most: int = 1_000) -> str:
        value = self._metadata.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise broken(key, f"is a {type(value).__name__}, not a string")
        if len(value) > most:
            raise broken(key, f"has {len(value)} characters, the limit is {most}")
        return value

    def _flag(self, name: str) -> bool | None:
        value = self._metadata.get(PREFIX + name)
        if value is None or isinstance(value, bool):
            return value
        raise broken(PREFIX + name, f"is a {type(value).__name__}, not true or false")

    def _array(self, key: str, most: int, item_type: type, noun: str) -> list[Any]:
        value = self._metadata.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise broken(key, f"is a {type(value).__name__}, not an array")
        if len(value) > most:
            raise broken(key, f"has {len(value)} entries, the limit is {most}")
        if set(map(type, value)) - {item_type}:
            raise broken(key, f"holds something else than {noun}")
        return value

    def _strings(self, key: str, most: int, most_chars: int) -> list[str]:
        values = self._array(key, most, str, "strings")
        chars = sum(map(len, values))
        if chars > most_chars:
            raise broken(key, f"has {chars} characters, the limit is {most_chars}")
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            raise broken(key, "holds a string that is not valid Unicode") from None
        return values


def broken(key: str, problem: str) -> ModelNotFound:
    """The error for a key of the header."""
    return ModelNotFound(f"the GGUF header's {shorten(key, 80)} {problem}")
