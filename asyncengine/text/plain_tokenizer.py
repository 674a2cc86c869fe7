"""The tokenizers of the commonest models, read without transformers: importing it takes longer than loading a small
model.

A tokenizer.json holds all of a tokenizer, which the `tokenizers` package reads by itself. But transformers may build it
anew by the rules of a class, add tokens, or change what stands before and behind a text. Only files are read here of
which it is certain that it would do none of this, or that its class has the very rules of the file; every key of
tokenizer_config.json must be known. `read_plain_tokenizer` gives None for all others: they are left to transformers
(`tests/core/text/test_plain_tokenizer.py` compares both).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

_RULES = tomllib.loads((resources.files(__package__) / "plain_tokenizers.toml").read_text(encoding="utf-8"))
FAMILIES, NAMED = _RULES["families"], _RULES["named"]
_LARGE = 100_000
"""Tokens from which on transformers looks for Mistral's wrong splitting, and warns of it."""


@dataclass(eq=False)
class PlainTokenizer:
    """The part of a transformers tokenizer that an engine uses: ids, text, special tokens and the chat template.

    Any number of threads may use it.
    """

    backend_tokenizer: Any
    special_tokens_map: Mapping[str, str]
    """{name: token} of the named ones."""
    chat_template: str | None
    digest: str | None = None
    """Digest of the file which the backend was made of; None: of one that has more in it."""

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_chat_template(self, tools: object = None) -> str:
        """The only one there is. Raises `ValueError` without any."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template")
        return self.chat_template

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def read_plain_tokenizer(folder: Path, family: str) -> PlainTokenizer | None:
    """The tokenizer in `folder`, beside a model of `family`; None: transformers has to read it."""
    if not folder.is_dir() or (folder / "additional_chat_templates").exists():
        return None
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        content = json.loads(text)
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else config.get("chat_template")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    if not isinstance(content, dict) or not isinstance(template, (str, type(None))) or not _has_known_keys(config):
        return None
    from tokenizers import Tokenizer

    try:
        size = len(content["model"]["vocab"]) + len(content["added_tokens"])
        class_name = _class_of(folder, family, config, text, size)
        defaults = _RULES["qwen2"]["tokens"] if class_name == "Qwen2Tokenizer" else {}
        named = {name: _name(config.get(name, defaults.get(name))) for name in NAMED}
        special = {name: token for name, token in named.items() if token is not None}
        if class_name is None or not _is_whole(folder, config, content, [*special.values(), *_listed(config)]):
            return None
        if class_name == "Qwen2Tokenizer" and not _is_qwen(content):
            return None
        backend = Tokenizer.from_str(text)
    except Exception:  # no such file as it is expected here; the package raises nothing more special
        return None
    backend.encode_special_tokens = False
    return PlainTokenizer(backend, special, template, hashlib.sha256(text.encode()).hexdigest())


def _has_known_keys(config: Any) -> bool:
    """Whether every key of tokenizer_config.json is one whose meaning is known here."""
    if not isinstance(config, dict) or not isinstance(config.get("tokenizer_class"), str):
        return False
    for key, value in config.items():
        if key in NAMED or key in _RULES["listed"] or key in ("added_tokens_decoder", "chat_template"):
            continue  # looked at by `_is_whole` and `read_plain_tokenizer`
        if key in _RULES["off"] and not value:
            continue
        if type(value).__name__ not in _RULES["silent"].get(key, ()):
            return False
    return True


def _class_of(folder: Path, family: str, config: Mapping[str, Any], text: str, size: int) -> str | None:
    """The class that transformers would take for a model of this family: "TokenizersBackend", which takes a file as it
    is, or "Qwen2Tokenizer"; None: another one."""
    declared = config["tokenizer_class"].removesuffix("Fast")
    as_it_is = declared in ("PreTrainedTokenizer", "TokenizersBackend")
    if family == "llama":  # Llama 3 and its like declare Llama 2's class by mistake
        return "TokenizersBackend" if as_it_is or (declared == "LlamaTokenizer" and '"ByteLevel"' in text) else None
    if family == "mistral":
        return None if (folder / "tekken.json").exists() or size > _LARGE else "TokenizersBackend"
    if family == "qwen2":
        return "Qwen2Tokenizer"  # whatever the file declares
    if family == "qwen3":
        return "Qwen2Tokenizer" if declared == "Qwen2Tokenizer" else "TokenizersBackend" if as_it_is else None
    return None


def _is_whole(folder: Path, config: Mapping[str, Any], content: Mapping[str, Any], special: Sequence[str]) -> bool:
    """Whether tokenizer.json has everything, so that nothing is added, replaced or cut off."""
    model, added = content["model"], {token["content"]: token for token in content["added_tokens"]}
    if model.get("type") != "BPE" or content.get("truncation") is not None or content.get("padding") is not None:
        return False
    if "added_tokens_decoder" in config:  # with the same tokens, and the same flags
        by_id = {str(token["id"]): {**token, "id": None} for token in content["added_tokens"]}
        if any(by_id.get(index) != {**token, "id": None} for index, token in config["added_tokens_decoder"].items()):
            return False
    elif any((folder / name).exists() for name in _RULES["elsewhere"]):
        return False
    flags = _RULES["flags"].items()
    return all(name in added and all(added[name][flag] is on for flag, on in flags) for name in special)


def _listed(config: Mapping[str, Any]) -> list[str]:
    """Special tokens without a name. Raises `TypeError` where they have names of their own."""
    lists = [config.get(key) or [] for key in _RULES["listed"]]
    if not all(isinstance(entries, list) for entries in lists):
        raise TypeError("named special tokens of a model's own")
    return [token for entries in lists for token in map(_name, entries) if token is not None]


def _name(token: Any) -> str | None:
    """A token is its text, or a dict with it."""
    if isinstance(token, dict) and token.get("__type") == "AddedToken":
        token = token["content"]
    if not isinstance(token, (str, type(None))):
        raise TypeError("no token")
    return token


def _is_qwen(content: Mapping[str, Any]) -> bool:
    """Whether the file has the rules of `Qwen2Tokenizer`, which takes nothing of it but vocabulary, merges, added
    tokens and what stands before and behind a text."""
    model, before = content["model"], content["pre_tokenizer"]
    steps = before["pretokenizers"] if before["type"] == "Sequence" else []
    if content["normalizer"] != {"type": "NFC"} or len(steps) != 2 or content["decoder"]["type"] != "ByteLevel":
        return False
    split = {"type": "Split", "pattern": {"Regex": _RULES["qwen2"]["split"]}, "behavior": "Isolated", "invert": False}
    level = {key: steps[1].get(key) for key in ("type", "add_prefix_space", "use_regex")}
    if steps[0] != split or level != {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
        return False
    if any(model.get(option) for option in _RULES["qwen2"]["options"]):
        return False
    new = [token["id"] for token in content["added_tokens"] if token["content"] not in model["vocab"]]
    return new == list(range(len(model["vocab"]), len(model["vocab"]) + len(new)))
