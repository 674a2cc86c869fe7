"""Reads adapter_config.json, PEFT's `LoraConfig` as of 0.21. Fields that cannot be honoured are refused by name.

A setting that changes the answer and is not implemented is refused, and so is one that this version does not know,
unless it is off: an adapter that loads must answer as it does under PEFT.
"""

from __future__ import annotations

import math
import re
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import TYPE_CHECKING, Any

from asyncengine.errors import AdapterError
from asyncengine.seams import ModuleDims

if TYPE_CHECKING:
    import regex  # type: ignore[import-untyped]

MAX_PATTERN_CHARS = 4096
SECONDS = 5.0
"""Time limit of all pattern matches of one adapter together."""
MAX_REPEATS = 10_000
"""Product of all counts `{n}` in one pattern: `regex` unrolls them."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_COUNT = re.compile(r"\d{1,5}(,\d{0,5})?|,\d{1,5}")


class Patterns:
    """Matches the regular expressions of one configuration, within a time limit. Every method raises `AdapterError`
    naming `field`.

    PEFT matches with `re`, which has no limit and keeps the interpreter to itself: a pattern like `(a|a)*b` would stop
    the whole process. `regex` reads the same patterns, lets other threads run and gives up in time.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._deadline = time.monotonic() + seconds
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def fullmatch(self, pattern: str, text: str, field: str) -> bool:
        return self._match(pattern, text, field) is not None

    def first_key(self, keys: Iterable[str], module: str, field: str) -> str | None:
        """The first of `keys` that matches `module`: its whole path, or the end of it behind a dot."""
        return next((key for key in keys if self.fullmatch(rf"(?:.*\.)?(?:{key})", module, field)), None)

    def layer_index(self, layers_patterns: list[str], module: str) -> int | None:
        """Index of the layer that contains `module`: the first number in its path behind one of `layers_patterns`."""
        if not layers_patterns:
            return _index_in(self._match(r".*?\.[^.]*\.(?P<index>\d+)\..*", module, "layers_to_transform"))
        for pattern in layers_patterns:
            match = self._match(rf"(?:|.*?\.)(?:{pattern})\.(?P<index>\d+)\..*", module, "layers_pattern")
            if match is not None:
                return _index_in(match)
        return None

    def _match(self, pattern: str, text: str, field: str) -> regex.Match[str] | None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise AdapterError(field, f"has a pattern of {len(pattern)} characters, over {MAX_PATTERN_CHARS}")
        import regex  # takes a tenth of a second, and most engines have no adapter with a pattern

        seconds_left = self._deadline - time.monotonic()
        try:
            compiled = self._compiled.get(pattern)
            if compiled is None:
                compiled = self._compiled[pattern] = _compile(pattern, field)
            if seconds_left <= 0:
                raise TimeoutError
            return compiled.fullmatch(text, timeout=seconds_left, concurrent=True)
        except TimeoutError:
            raise AdapterError(field, "takes too long to match; write a simpler pattern", pattern) from None
        except (re.error, regex.error, RecursionError, OverflowError, MemoryError, ValueError, IndexError) as error:
            raise AdapterError(field, f"is not a regular expression ({error})", pattern) from None


def _compile(pattern: str, field: str) -> regex.Pattern[str]:
    """Compile a pattern that `re` accepts, too, with the same meaning: `regex` has more (recursion, fuzzy counts)."""
    counts = _BRACES.findall(pattern)
    if any(_COUNT.fullmatch(count) is None for count in counts):
        raise AdapterError(field, "has braces that are no count", pattern)
    sizes = [max([1, *(int(number) for number in count.split(",") if number)]) for count in counts]
    if math.prod(sizes) > MAX_REPEATS:
        raise AdapterError(field, f"repeats more than {MAX_REPEATS} times in all", pattern)
    re.compile(pattern)
    import regex

    return regex.compile(pattern)


def _index_in(match: regex.Match[str] | None) -> int | None:
    return None if match is None else int(match["index"][:9])


PEFT_TABLES = tomllib.loads((resources.files(__package__) / "peft_fields.toml").read_text(encoding="utf-8"))
"""Tables of the names that PEFT gives to settings and tensors."""
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that do not change the base model's weights."""
MAX_ENTRIES = 50_000


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """A configuration that can be applied exactly."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: list[str] | str
    """Names, one regular expression, or "all-linear"."""
    exclude_modules: list[str] | str
    layers_to_transform: list[int] | None
    layers_pattern: list[str]
    fan_in_fan_out: bool
    use_dora: bool
    bias: str
    lora_bias: bool
    modules_to_save: list[str]
    trainable_token_indices: dict[str, list[int]]
    """Token ids by the name of the module whose rows they are; "" for the embedding, whatever its name."""
    ensure_weight_tying: bool
    alora_invocation_tokens: list[int]
    base_name: str
    """The model that the adapter was trained on. For messages only."""
    patterns: Patterns

    @property
    def all_linear(self) -> bool:
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

    def targets(self, module: str, base: ModuleDims) -> bool:
        """Whether PEFT would put an adapter on `module`."""
        if self._named(self.exclude_modules, module, "exclude_modules"):
            return False
        if self.all_linear:
            return base.kind != "embedding"
        if not self._named(self.target_modules, module, "target_modules"):
            return False
        if self.layers_to_transform is None or module in self.target_modules:
            # PEFT ignores `layers_to_transform` for names that are whole paths
            return True
        return self.patterns.layer_index(self.layers_pattern, module) in self.layers_to_transform

    def _named(self, names: list[str] | str, module: str, field: str) -> bool:
        if isinstance(names, str):
            return self.patterns.fullmatch(names, module, field) if names else False
        return any(module == name or module.endswith(f".{name}") for name in names)

    def saves(self, module: str, base: ModuleDims) -> bool:
        """Whether PEFT would train the whole of `module`, if it is the embedding or the output layer."""
        return base.of_tokens and any(module.endswith(name) for name in self.modules_to_save)

    def tokens_of(self, module: str, base: ModuleDims) -> list[int] | None:
        """The tokens whose rows of `module` PEFT would train; None: it would train none."""
        for name, tokens in self.trainable_token_indices.items():
            if module.endswith(name) if name else base.kind == "embedding":
                return tokens
        return None

    def rank_of(self, module: str) -> tuple[int, str]:
        """The rank of `module` and the field that says so."""
        key = self.patterns.first_key(self.rank_pattern, module, "rank_pattern")
        return (self.r, "r") if key is None else (self.rank_pattern[key], "rank_pattern")

    def scaling_of(self, module: str) -> float:
        """The factor of the product of B and A (rslora: Kalajdzievski 2023)."""
        rank, _ = self.rank_of(module)
        key = self.patterns.first_key(self.alpha_pattern, module, "alpha_pattern")
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


_USED = {field.name for field in fields(PeftConfig)} - {"base_name", "patterns"} | {"peft_type", "init_lora_weights"}


def read_peft_config(raw: Mapping[str, Any]) -> PeftConfig:
    """Raises `AdapterError` naming the first field that cannot be honoured."""
    _refuse_unsupported(raw)
    target = raw.get("target_modules")
    layers = raw.get("layers_to_transform")
    layers_pattern = raw.get("layers_pattern") or []
    config = PeftConfig(
        r=_rank("r", raw.get("r", 8)),
        lora_alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=_flag("use_rslora", raw),
        rank_pattern={key: _rank("rank_pattern", value) for key, value in _table("rank_pattern", raw).items()},
        alpha_pattern={key: _number("alpha_pattern", value) for key, value in _table("alpha_pattern", raw).items()},
        target_modules=_names("target_modules", target),
        exclude_modules=_names("exclude_modules", raw.get("exclude_modules") or []),
        layers_to_transform=_integers("layers_to_transform", layers),
        layers_pattern=[layers_pattern] if isinstance(layers_pattern, str) else _strings(
            "layers_pattern", layers_pattern
        ),
        fan_in_fan_out=_flag("fan_in_fan_out", raw),
        use_dora=_flag("use_dora", raw),
        bias=str(raw.get("bias") or "none"),
        lora_bias=_flag("lora_bias", raw),
        modules_to_save=_strings("modules_to_save", raw.get("modules_to_save") or []),
        trainable_token_indices=_tokens("trainable_token_indices", raw),
        ensure_weight_tying=_flag("ensure_weight_tying", raw),
        alora_invocation_tokens=_integers("alora_invocation_tokens", raw.get("alora_invocation_tokens")) or [],
        base_name=str(raw.get("base_model_name_or_path") or "another model")[:200],
        patterns=Patterns(),
    )  # fmt: skip
    if not target:
        raise AdapterError("target_modules", 'must be a list of names, a regular expression, or "all-linear"', target)
    if config.layers_to_transform is not None and isinstance(config.target_modules, str):
        raise AdapterError("layers_to_transform", "needs target_modules as a list of names")
    if config.layers_pattern and config.layers_to_transform is None:
        raise AdapterError("layers_pattern", "means nothing without layers_to_transform")
    return config


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError("peft_type", 'must be "LORA"; nothing else is supported', raw.get("peft_type"))
    for field, advice in PEFT_TABLES["refused"].items():
        if raw.get(field) is not None and raw[field] is not False and raw[field] != [] and raw[field] != {}:
            raise AdapterError(field, advice, raw[field])
    if raw.get("bias", "none") not in ("none", "all", "lora_only"):
        raise AdapterError("bias", 'must be "none", "all" or "lora_only"', raw["bias"])
    initial = raw.get("init_lora_weights", True)
    if not any(initial is kept or (isinstance(initial, str) and initial == kept) for kept in _KEEP_BASE):
        raise AdapterError(
            "init_lora_weights",
            "this initialisation may change the base model's weights, and the file does not hold them; save a plain "
            "LoRA with peft: save_pretrained(folder, path_initial_model_for_weight_conversion=initial_folder), or load "
            "the changed base model and set this to true",
            initial,
        )
    for field, value in raw.items():
        if value and not any(field in kept for kept in (_USED, PEFT_TABLES["ignored"], PEFT_TABLES["refused"])):
            raise AdapterError(field[:80], "this setting is unknown here and could change the answers", value)


def _flag(field: str, raw: Mapping[str, Any]) -> bool:
    value = raw.get(field)
    if value is not None and not isinstance(value, bool):
        raise AdapterError(field, "must be true or false", value)
    return bool(value)


def _rank(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise AdapterError(field, "must be a whole number, at least 1", value)
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e9:
        raise AdapterError(field, "must be a finite number", value)
    return float(value)


def _table(field: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    value = raw.get(field) or {}
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        raise AdapterError(field, f"must be an object of at most {MAX_ENTRIES} entries")
    return value


def _strings(field: str, value: Any) -> list[str]:
    if not isinstance(value, list) or len(value) > MAX_ENTRIES or not all(isinstance(name, str) for name in value):
        raise AdapterError(field, f"must be a list of at most {MAX_ENTRIES} names, or a string", value)
    return list(value)


def _tokens(field: str, raw: Mapping[str, Any]) -> dict[str, list[int]]:
    value = raw.get(field) or {}
    by_module = {"": value} if isinstance(value, list) else _table(field, raw)
    tokens = {name: _integers(field, ids) or [] for name, ids in by_module.items()}
    if any(min(ids, default=0) < 0 or len(set(ids)) < len(ids) for ids in tokens.values()):
        raise AdapterError(field, "must hold token ids, each once", value)
    return tokens


def _names(field: str, value: Any) -> list[str] | str:
    return value if isinstance(value, str) else _strings(field, value if value is not None else [])


def _integers(field: str, value: Any) -> list[int] | None:
    if value is None or value == []:
        return None
    numbers = [value] if type(value) is int else value
    if not isinstance(numbers, list) or any(type(index) is not int for index in numbers):
        raise AdapterError(field, "must be a whole number or a list of them", value)
    return numbers
