"""Checks that refuse a folder and its config.json before a model is built: other models than text generators (with a
hint what to do instead), impossible sizes, and unknown layers.

transformers builds whatever a configuration says: a million layers take minutes and all memory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.config import OLDER_TYPES, unknown_layers

_TABLES = tomllib.loads((resources.files(__package__) / "refusals.toml").read_text(encoding="utf-8"))
_FILES, _ENDINGS, _LISTS, _LAYERS = (_TABLES[title] for title in ("files", "endings", "lists", "layers"))
_GENERATOR = "Pass a model for text generation"


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head, in one of the spellings that are read. The authors' own files
    declare a Llama, and differ by their `draft_vocab_size` alone."""
    names = _architectures(config)
    if "speculators_model_type" in config or any(drafter in name for name in names for drafter in _LISTS["drafters"]):
        return config.get("speculators_model_type", "eagle3") == "eagle3" and all("Eagle3" in name for name in names)
    return "draft_vocab_size" in config


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def check_files(folder: Path, writes: bool = True) -> None:
    """Refuse a folder whose files show that it holds another model. `writes`: a text generator is required; else an
    embedder or reranker is accepted, too. Raises `UnsupportedModel`."""
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{folder} is a LoRA adapter: load its base model, and it with adapters={{'NAME': PATH}}"
        )
    for name, what in _FILES.items():
        if (writes or name not in _LISTS["vector_files"]) and (folder / name).is_file():
            raise UnsupportedModel(f"{folder} {what}. {_GENERATOR}")


def check_architectures(folder: Path, config: Mapping[str, Any], writes: bool = True, drafts: bool = False) -> None:
    """Refuse a config.json whose `architectures` name a model of another task. `writes` as in `check_files`; `drafts`:
    a draft model or head is accepted. Raises `UnsupportedModel`.

    The fields of a classifier are those of its family's text generator, and transformers would load one as the other,
    with random weights for the missing modules.
    """
    if is_eagle3(config):
        if drafts:
            return
        raise UnsupportedModel(
            f"{folder} is an EAGLE-3 head, which guesses for the model that it was trained for: load that one, and the "
            "head with draft_model=PATH"
        )
    for name in _architectures(config):
        if any(drafter in name for drafter in _LISTS["drafters"]):
            raise UnsupportedModel(
                f"{folder} ({name}) guesses by the hidden states of the model that it was trained for; of such heads "
                "those of the EAGLE-3 form are read, and no others"
            )
        for ending, what in _ENDINGS.items():
            if name.endswith(ending) and (writes or ending not in _LISTS["without_head"]):
                raise UnsupportedModel(f"{folder} ({name}) {what}. {_GENERATOR}")


def not_causal(family: str, config: Mapping[str, Any]) -> UnsupportedModel:
    """The error for a family that has no text generator of its own."""
    name = next(iter(_architectures(config)), "")
    sees = any(field in config for field in ("vision_config", "image_size", "num_channels"))
    writes = name.endswith(("ForConditionalGeneration", "ForCausalLM"))
    if sees and writes:
        from asyncengine.execution.models.families import MULTIMODAL

        known = ", ".join(sorted(MULTIMODAL))
        what = f"is a vision-language model; images are not read here, and the text of these alone is served: {known}"
    elif sees:
        what = "is a vision model: it writes no text"
    elif name.endswith("Model"):
        what = "is an encoder, as embedding models are: it writes no text"
    else:
        what = "writes no text"
    return UnsupportedModel(f"family {family!r} is not a causal language model: it {what}. {_GENERATOR}")


MAX_LAYERS: int = _TABLES["limits"]["layers"]["most"]
LENGTH_FIELDS: Sequence[str] = _TABLES["limits"]["positions"]["fields"]
_LIMITS, _LEAST = (
    {name: each[bound] for each in _TABLES["limits"].values() if bound in each for name in each["fields"]}
    for bound in ("most", "least")
)


def check_sizes(config: Mapping[str, Any], num_tensors: int | None) -> None:
    """Refuse impossible sizes in a configuration and in those nested in it. `num_tensors`: number of tensors in the
    files; None if they were not opened.

    Raises `ModelNotFound` naming the field and its limit.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            # the tensors of a nested model may be in other files
            check_sizes(value, None)
        if name in _LAYERS["named"] and isinstance(value, (str, list)) and not 1 <= len(value) <= MAX_LAYERS:
            raise ModelNotFound(f"config.json: {name} must name between 1 and {MAX_LAYERS} layers, got {len(value)}")
        limit = _LIMITS.get(name)
        if limit is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue  # a wrong type is found by the family's own configuration
        least = 1 if name in (*_LAYERS["counts"], *_LISTS["never_none"]) else _LEAST.get(name, value)
        if not least <= value <= limit:
            shown = value if abs(value) < 1e20 else "far more"
            raise ModelNotFound(f"config.json: {name} must be between {min(least, 1)} and {limit}, got {shown}")
        if num_tensors is not None and name in _LAYERS["counts"] and value > num_tensors:
            raise ModelNotFound(f"config.json: {name} is {value}, but the files hold only {num_tensors} tensors")


def misnamed(config: Mapping[str, Any]) -> EngineError | None:
    """The error for unknown or contradictory layers in a config.json, or in its `text_config`; None if there are none.

    transformers' configuration classes fail at the first unknown value, with a KeyError of one letter or an arithmetic
    error. Layers are therefore checked here before a family's table reads the file, and before such an error is shown.
    """
    text_config = config.get("text_config")
    for section in (config, text_config) if isinstance(text_config, Mapping) else (config,):
        for error in _errors(str(section.get("model_type") or config.get("model_type")), section):
            return error
    return None


def _errors(family: str, config: Mapping[str, Any]) -> Iterator[EngineError]:
    from asyncengine.execution.models.families import known_layer_types

    known = known_layer_types(family) or _LAYERS["types"]
    for field in _LAYERS["lists"]:
        older = (name for name, today in OLDER_TYPES.items() if today in known)  # transformers accepts these, too
        for name in _strangers(config.get(field), (*known, *older)):
            yield unknown_layers(family, name, known)
    for name in _strangers(config.get("mlp_layer_types"), _LAYERS["forwards"]):
        yield unknown_layers(family, name, _LAYERS["forwards"], "feed-forward parts")
    for field in _LAYERS["patterns"]:
        yield from _pattern_errors(family, field, config.get(field, ""))
    for field in _LAYERS["intervals"]:
        every = config.get(field, 1)
        if (isinstance(every, str) or every == 0) and config.get("layer_types"):
            continue  # in EXAONE 4 it is a pattern of letters, or 0 without windows, and `layer_types` decides
        if not isinstance(every, int) or every < 1:
            yield ModelNotFound(f"config.json: {field} must be a number of layers, got {shorten(repr(every), 80)}")
    count, unrotated = config.get("num_hidden_layers"), config.get("no_rope_layers")
    if isinstance(unrotated, list) and isinstance(count, int) and len(unrotated) != count:
        yield ModelNotFound(f"config.json: no_rope_layers names {len(unrotated)} layers, and there are {count}")
    if "linear_attn_config" in config:
        yield from _kimi_errors(config["linear_attn_config"], count)


def _pattern_errors(family: str, field: str, pattern: object) -> Iterator[EngineError]:
    letters = _LAYERS["letters"]
    if not isinstance(pattern, (str, list)):
        yield ModelNotFound(
            f"config.json: {field} must be a letter for each layer ({', '.join(letters)}), "
            f"got {shorten(repr(pattern), 80)}"
        )
        return
    for letter in _strangers(list(pattern), letters):
        meant = [f"{each} ({meaning})" for each, meaning in letters.items()]
        yield unknown_layers(family, letter, meant, f"layers in {field}")


def _strangers(listed: object, known: Collection[str]) -> list[object]:
    return [name for name in listed if name not in known] if isinstance(listed, list) else []


def _kimi_errors(settings: object, count: object) -> Iterator[EngineError]:
    """Errors in Kimi Linear's two lists of layers, counted from 1, which together must name each of `count` layers."""
    if not isinstance(settings, Mapping):
        yield ModelNotFound(f"config.json: linear_attn_config must be an object, got {shorten(repr(settings), 80)}")
        return
    names = _LAYERS["kimi"]
    if not isinstance(count, int) or not all(isinstance(settings.get(name), list) for name in names):
        return
    listed = [layer for name in names for layer in settings[name]]
    wrong = [layer for layer in listed if not isinstance(layer, int) or not 1 <= layer <= count]
    missing = [layer for layer in range(1, count + 1) if layer not in listed]
    if wrong or missing:
        problem = f"names layer {shorten(repr(wrong[0]), 80)}" if wrong else f"leaves out layer {missing[0]}"
        yield ModelNotFound(
            f"config.json: linear_attn_config {problem}; {' and '.join(names)} together name each of 1 to {count}"
        )
