"""The tokenizer's part of a GGUF header, checked before anything is built from it."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from asyncengine.errors import ModelNotFound, shorten

T = TypeVar("T")

PREFIX = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
HUGGINGFACE_KEY = "tokenizer.huggingface.json"

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
"""How some writers say that there is no such token."""

ID_KEYS = {
    "bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id",
    "unk": "unknown_token_id", "cls": "cls_token_id", "sep": "seperator_token_id",
}  # fmt: skip
"""Our short names and the format's keys (whose spelling of "separator" is the format's)."""


class TokenType(IntEnum):
    """What a token is, in the numbers of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class TokenizerHeader:
    """What a GGUF header says of its tokenizer, of the right types and within bounds.

    `tokens[i]` has the id `i`, `types[i]` (NORMAL where the file has none) and, in files of the kinds that have them,
    `scores[i]`; all three are of one length. `ids` holds those special ids (keys of `ID_KEYS`) that the file names.
    """

    kind: str
    pre: str
    architecture: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    ids: dict[str, int]
    add_bos: bool | None
    add_eos: bool | None
    space_prefix: bool | None
    lowercase: bool | None
    strip_accents: bool | None
    chat_templates: dict[str, str]
    huggingface: str
    """A whole tokenizer.json, which the format has room for but few files have."""

    @property
    def is_gemma(self) -> bool:
        return self.architecture.startswith("gemma")

    def name_of(self, which: str) -> str | None:
        """The token named bos, eos, ... (a key of `ID_KEYS`), if the file has one."""
        return self.tokens[self.ids[which]] if which in self.ids else None


def read_header(metadata: Mapping[str, Any]) -> TokenizerHeader:
    """Check the metadata of a GGUF file. Arrays may be lists or numpy arrays.

    Raises `ModelNotFound` naming the key that is missing, of the wrong type, too long, or that contradicts another.
    """
    kind = _text(metadata, PREFIX + "model", required=True)
    tokens = _tokens(metadata)
    return TokenizerHeader(
        kind=kind,
        pre=_text(metadata, PREFIX + "pre"),
        architecture=_text(metadata, "general.architecture"),
        tokens=tokens,
        types=_types(metadata, len(tokens)),
        scores=_scores(metadata, len(tokens)),
        merges=_merges(metadata),
        ids=_ids(metadata, len(tokens)),
        add_bos=_flag(metadata, PREFIX + "add_bos_token"),
        add_eos=_flag(metadata, PREFIX + "add_eos_token"),
        space_prefix=_flag(metadata, PREFIX + "add_space_prefix"),
        lowercase=_flag(metadata, PREFIX + "normalizer.lowercase"),
        strip_accents=_flag(metadata, PREFIX + "normalizer.strip_accents"),
        chat_templates=_templates(metadata),
        huggingface=_text(metadata, HUGGINGFACE_KEY, MAX_HUGGINGFACE_CHARS),
    )


def broken(key: str, what: str) -> ModelNotFound:
    """The error for a key of the header."""
    return ModelNotFound(f"the GGUF header's {shorten(key, 80)} {what}")


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    key = PREFIX + "tokens"
    tokens = _strings(metadata, key, MAX_TOKENS, MAX_VOCABULARY_CHARS)
    if not tokens:
        raise broken(key, "is missing or empty")
    if "" in tokens:  # the same names for tokens without one as other readers of the format give
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise broken(key, f"holds a token of {longest} characters, the limit is {MAX_TOKEN_CHARS}")
    if len(set(tokens)) != len(tokens):
        seen: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if seen.setdefault(token, index) != index:
                raise broken(key, f"holds {shorten(repr(token), 40)} twice, as {seen[token]} and {index}")
    return tokens


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    key = PREFIX + "token_type"
    values = _array(metadata, key, MAX_TOKENS)
    if not values:
        return [int(TokenType.NORMAL)] * count
    if not all(hasattr(kind, "__index__") for kind in set(map(type, values))):
        raise broken(key, "holds something else than whole numbers")
    types = [operator.index(value) for value in values]
    for unknown in set(types).difference(TokenType):
        known = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in TokenType)
        raise broken(key, f"holds {unknown} at token {types.index(unknown)}; known are {known}")
    added = sum(map(types.count, (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)))
    if added > MAX_ADDED_TOKENS:
        raise broken(key, f"marks {added} tokens as control or user-defined, the limit is {MAX_ADDED_TOKENS}")
    return _as_many(key, types, count)


def _scores(metadata: Mapping[str, Any], count: int) -> list[float]:
    key = PREFIX + "scores"
    values = _array(metadata, key, MAX_TOKENS)
    if not values:
        return []
    if not all(hasattr(kind, "__float__") for kind in set(map(type, values))):
        raise broken(key, "holds something else than numbers")
    scores = [float(value) for value in values]
    if not all(map(math.isfinite, scores)):
        raise broken(key, "holds a number that is not finite")
    return _as_many(key, scores, count)


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    key = PREFIX + "merges"
    merges = []
    for index, merge in enumerate(_strings(metadata, key, MAX_MERGES, MAX_MERGES_CHARS)):
        cut = merge.find(" ", 1)  # the left part may itself begin with a space
        if cut < 1 or cut + 1 == len(merge):
            raise broken(key, f"holds {shorten(repr(merge), 60)} at {index}, which is no pair of tokens")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    ids = {}
    for name, short in ID_KEYS.items():
        key = PREFIX + short
        value = metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise broken(key, f"is {shorten(repr(value), 40)}, not a token's id")
        number = operator.index(value)
        if number == NO_ID:
            continue
        if not 0 <= number < count:
            raise broken(key, f"is {number}, outside the vocabulary of {count} tokens")
        ids[name] = number
    return ids


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; the one without a name is called "default", as transformers calls it."""
    found: dict[str, str] = {}
    for key in metadata:
        if key == TEMPLATE_KEY:
            found["default"] = _text(metadata, key, MAX_TEMPLATE_CHARS)
        elif isinstance(key, str) and key.startswith(TEMPLATE_KEY + "."):
            found[key.removeprefix(TEMPLATE_KEY + ".")] = _text(metadata, key, MAX_TEMPLATE_CHARS)
        if len(found) > MAX_TEMPLATES:
            raise broken(TEMPLATE_KEY, f"comes in more than {MAX_TEMPLATES} forms")
    return found


# -- values of one type


def _text(metadata: Mapping[str, Any], key: str, most: int = 1_000, *, required: bool = False) -> str:
    value = metadata.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str):
        raise broken(key, "is missing" if value is None else f"is a {type(value).__name__}, not a string")
    if len(value) > most:
        raise broken(key, f"has {len(value)} characters, the limit is {most}")
    return value


def _flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = metadata.get(key)
    if value is None or isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_"):  # numpy's
        return bool(value)
    raise broken(key, f"is a {type(value).__name__}, not true or false")


def _array(metadata: Mapping[str, Any], key: str, most: int) -> list[Any]:
    value = metadata.get(key)
    if value is None:
        return []
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError
        length = len(value)
    except TypeError:
        raise broken(key, f"is a {type(value).__name__}, not an array") from None
    if length > most:
        raise broken(key, f"has {length} entries, the limit is {most}")
    return list(value.tolist() if hasattr(value, "tolist") else value)


def _strings(metadata: Mapping[str, Any], key: str, most: int, most_chars: int) -> list[str]:
    values = _array(metadata, key, most)
    if not all(issubclass(kind, str) for kind in set(map(type, values))):
        raise broken(key, "holds something else than strings")
    chars = sum(map(len, values))
    if chars > most_chars:
        raise broken(key, f"has {chars} characters, the limit is {most_chars}")
    try:
        "".join(values).encode()
    except UnicodeEncodeError:
        raise broken(key, "holds a string that is not valid Unicode") from None
    return values


def _as_many(key: str, values: list[T], count: int) -> list[T]:
    if len(values) != count:
        raise broken(key, f"has {len(values)} entries for {count} tokens")
    return values
