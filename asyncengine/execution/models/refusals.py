"""Reasons to refuse a folder and its config.json before anything is built of them: another kind of model than a text
generator, said in words, with what to do instead, sizes that no model has, and layers that no family has.

transformers builds whatever a configuration says: a million layers take minutes and all memory there is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.config import OLDER_KINDS, unknown_layers

_TABLES = tomllib.loads((resources.files(__package__) / "refusals.toml").read_text(encoding="utf-8"))
_FILES, _ENDINGS, _LISTS, _LAYERS = (_TABLES[title] for title in ("files", "endings", "lists", "layers"))
_GENERATOR = "Pass a model for text generation"


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head of the EAGLE-3 form, in one of the spellings that are read. Files of the
    authors' own call it a Llama, of which a part of the vocabulary can be drafted."""
    names = _architectures(config)
    if "speculators_model_type" in config or any(part in name for name in names for part in _LISTS["drafters"]):
        return config.get("speculators_model_type", "eagle3") == "eagle3" and all("Eagle3" in name for name in names)
    return "draft_vocab_size" in config


def _architectures(config: Mapping[str, Any]) -> list[str]:
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def check_files(folder: Path, writes: bool = True) -> None:
    """Refuse what a file beside config.json gives away. `writes`: a text generator is wanted, else one that gives
    vectors or scores would do. Raises `UnsupportedModel`."""
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").is_file():
        raise UnsupportedModel(
            f"{folder} is a LoRA adapter: load its base model, and it with adapters={{'NAME': PATH}}"
        )
    for name, what in _FILES.items():
        if (writes or name not in _LISTS["vector_files"]) and (folder / name).is_file():
            raise UnsupportedModel(f"{folder} {what}. {_GENERATOR}")


def check_architectures(folder: Path, config: Mapping[str, Any], writes: bool = True, drafts: bool = False) -> None:
    """Refuse what config.json says was trained for something else. `writes` as above; `drafts`: a model is wanted that
    guesses for another. Raises `UnsupportedModel`.

    A family's configuration is the same for its text generator and for a classifier made of it, and transformers loads
    either as either, with the missing parts made up at random.
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
    sees = any(part in config for part in ("vision_config", "image_size", "num_channels"))
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
    """Refuse impossible sizes, in the configuration and in those inside it. `num_tensors`: in the files, if there are.

    Raises `ModelNotFound` naming the field and its limit.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            # a model of several parts may have them in other files
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
    """The error for what a config.json, or the `text_config` within, says of its layers and no family's file has; None:
    nothing to say.

    transformers' configuration classes end at the first thing they don't understand, with a letter or an arithmetic
    error. So layers are looked at here before a family reads the file, and before a class's own words are passed on.
    """
    inside = config.get("text_config")
    for part in (config, inside) if isinstance(inside, Mapping) else (config,):
        for error in _errors(str(part.get("model_type") or config.get("model_type")), part):
            return error
    return None


def _errors(family: str, config: Mapping[str, Any]) -> Iterator[EngineError]:
    from asyncengine.execution.models.families import layer_kinds

    known = layer_kinds(family) or _LAYERS["kinds"]
    for field in _LAYERS["lists"]:
        older = (name for name, kind in OLDER_KINDS.items() if kind in known)  # which transformers takes as well
        for kind in _strangers(config.get(field), (*known, *older)):
            yield unknown_layers(family, kind, known)
    for kind in _strangers(config.get("mlp_layer_types"), _LAYERS["forwards"]):
        yield unknown_layers(family, kind, _LAYERS["forwards"], "feed-forward parts")
    for field in _LAYERS["patterns"]:
        yield from _pattern_errors(family, field, config.get(field, ""))
    for field in _LAYERS["intervals"]:
        every = config.get(field, 1)
        if (isinstance(every, str) or every == 0) and config.get("layer_types"):
            continue  # EXAONE 4 spells its layers there, or says 0 without windows, and lists them
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
    return [kind for kind in listed if kind not in known] if isinstance(listed, list) else []


def _kimi_errors(settings: object, count: object) -> Iterator[EngineError]:
    """Errors of two lists of layers, counted from one, which together name each of `count`."""
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
        found = f"names layer {shorten(repr(wrong[0]), 80)}" if wrong else f"leaves out layer {missing[0]}"
        yield ModelNotFound(
            f"config.json: linear_attn_config {found}; {' and '.join(names)} together name each of 1 to {count}"
        )
