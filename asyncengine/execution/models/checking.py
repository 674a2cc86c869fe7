"""The check whether a family runs here, before and after loading. Every refusal names the family and the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncengine.config import EngineConfig, ModelSettings
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.families import MULTIMODAL, NATIVE, layer_kinds
from asyncengine.execution.models.families.common import unknown_layers
from asyncengine.execution.models.formats import CheckpointSource, first_line
from asyncengine.execution.models.refusals import not_causal

_EVERY = (
    "attention", "chunked_attention", "conv", "full_attention", "linear_attention", "mamba", "mlp", "moe",
    "sliding_attention",
)  # fmt: skip
"""Layer types that some family's file has, under today's name or an older one: known ones of families that are not
written down."""
_OLDER = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names that transformers takes as well."""
_LISTS = ("layer_types", "layers_block_type", "mtp_layers_block_type")
_PATTERNS = ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
_LETTERS = {"M": "Mamba-2", "*": "attention", "-": "a feed-forward part", "E": "experts"}
"""Letters of a pattern, one for each layer."""
_FORWARDS = ("dense", "sparse")
_INTERVALS = (
    "full_attention_interval", "sliding_window_pattern", "no_rope_layer_interval", "decoder_sparse_step",
    "moe_layer_interval",
)  # fmt: skip
"""Every so many layers one is of another type."""
_KIMI = ("kda_layers", "full_attn_layers")


def misnamed(config: Mapping[str, Any]) -> EngineError | None:
    """The error for what a config.json, or the `text_config` within, says of its layers and no family's file has; None:
    nothing to say.

    transformers' configuration classes end at the first thing they don't understand, with a letter or an arithmetic
    error. So layers are looked at here before a family reads the file, and before a class's own words are passed on.
    """
    inside = config.get("text_config")
    for part in (config, inside if isinstance(inside, Mapping) else {}):
        for error in _errors(str(part.get("model_type") or config.get("model_type")), part):
            return error
    return None


def _errors(family: str, config: Mapping[str, Any]) -> Iterator[EngineError]:
    known = layer_kinds(family) or _EVERY
    for field in _LISTS:
        for kind in _strangers(config.get(field), (*known, *(_OLDER[kind] for kind in known if kind in _OLDER))):
            yield unknown_layers(family, kind, known)
    for kind in _strangers(config.get("mlp_layer_types"), _FORWARDS):
        yield unknown_layers(family, kind, _FORWARDS, "feed-forward parts")
    for field in _PATTERNS:
        yield from _pattern_errors(family, field, config.get(field, ""))
    for field in _INTERVALS:
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
    if not isinstance(pattern, (str, list)):
        yield ModelNotFound(
            f"config.json: {field} must be a letter for each layer ({', '.join(_LETTERS)}), "
            f"got {shorten(repr(pattern), 80)}"
        )
        return
    for letter in _strangers(list(pattern), tuple(_LETTERS)):
        meant = [f"{letter} ({meaning})" for letter, meaning in _LETTERS.items()]
        yield unknown_layers(family, letter, meant, f"layers in {field}")


def _strangers(listed: object, known: Sequence[str]) -> list[object]:
    return [kind for kind in listed if kind not in known] if isinstance(listed, list) else []


def _kimi_errors(settings: object, count: object) -> Iterator[EngineError]:
    """Errors of two lists of layers, counted from one, which together name each of `count`."""
    if not isinstance(settings, Mapping):
        yield ModelNotFound(f"config.json: linear_attn_config must be an object, got {shorten(repr(settings), 80)}")
        return
    if not isinstance(count, int) or not all(isinstance(settings.get(name), list) for name in _KIMI):
        return
    listed = [layer for name in _KIMI for layer in settings[name]]
    wrong = [layer for layer in listed if not isinstance(layer, int) or not 1 <= layer <= count]
    missing = [layer for layer in range(1, count + 1) if layer not in listed]
    if wrong or missing:
        found = f"names layer {shorten(repr(wrong[0]), 80)}" if wrong else f"leaves out layer {missing[0]}"
        yield ModelNotFound(
            f"config.json: linear_attn_config {found}; {' and '.join(_KIMI)} together name each of 1 to {count}"
        )


_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATE_WEIGHTS = ("A_log", "dt_bias", ".A", ".D")
"""Last parts of the names of weights that recurrent layers have and attention has not."""


def load_config(checkpoint: CheckpointSource, config: ModelSettings) -> Any:
    """transformers' config object. Raises `UnsupportedModel` for an unknown family or one that needs its own code."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelNotFound(f"{checkpoint.folder / 'config.json'} names no model_type")
    if family not in CONFIG_MAPPING_NAMES and not config.trust_remote_code:
        if checkpoint.config.get("auto_map"):
            raise UnsupportedModel(
                f"family {family!r} needs code from the model's folder; trust_remote_code=True would run it"
            )
        raise UnsupportedModel(f"family {family!r} is not known to the installed transformers")
    try:
        if checkpoint.metadata:
            return AutoConfig.for_model(**checkpoint.config)
        return AutoConfig.from_pretrained(
            str(checkpoint.folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # config classes validate in many ways, each with its own exception
        if named := misnamed(checkpoint.config):
            raise named from error
        raise ModelNotFound(
            f"{checkpoint.folder / 'config.json'} is not a valid {family} config: {first_line(error)}"
        ) from error


def check_config(hf_config: Any, checkpoint: CheckpointSource, described: DecoderConfig | None) -> None:
    """Refuse what the config alone shows cannot run. Raises `UnsupportedModel`.

    `described`: the family is written down here, so that transformers' classes need not be looked at: importing them
    takes longer than reading a small model. If it has layers that keep a state, it has looked at their kinds itself.
    """
    family = hf_config.model_type
    native = described is not None
    keeps_states = described is not None and any(layer.state is not None for layer in described.layers)
    chunks = _has_chunks(described)
    if not native:
        _check_family(hf_config, checkpoint)
    kinds = sorted({stored.kind for stored in checkpoint.tensors.values() if stored.quantized})
    if kinds and not native:
        raise UnsupportedModel(
            f"family {family!r} runs through transformers' modules here, which take no quantized weights "
            f'({", ".join(kinds)}); use the unquantized weights, with quantization="int8" or "int4" if they are '
            "too large"
        )
    text_config = hf_config.get_text_config()
    for kind in kinds_of(text_config):
        if kind == "chunked_attention" and not chunks:
            raise UnsupportedModel(f"family {family!r} has layers of type {kind!r}, which is not written down for it")
        if kind not in (*_ATTENTION_LAYERS, "chunked_attention") and not keeps_states:
            raise UnsupportedModel(f"family {family!r} has layers of type {kind!r}, which keep no plain KV cache")
    if getattr(text_config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # no images here
        raise UnsupportedModel(f"family {family!r} is set to bidirectional attention")


def passed_over(hf_config: Any, config: EngineConfig) -> str:
    """The setting because of which a family that is written down here runs through transformers; "": none."""
    if hf_config.get_text_config().model_type not in NATIVE:
        return ""
    if not config.fuse:
        return "fuse=False"
    own_code = config.trust_remote_code and not type(hf_config).__module__.startswith("transformers.")
    return "trust_remote_code=True" if own_code else ""


def _check_family(hf_config: Any, checkpoint: CheckpointSource) -> None:
    """Refuse a family that transformers does not have as a causal language model, or not within our reach."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = hf_config.model_type
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"family {family!r} is an encoder-decoder; only decoder-only models run here")
    auto_map = checkpoint.config.get("auto_map")
    has_own = isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not has_own:
        if family in MULTIMODAL:
            text = hf_config.get_text_config().model_type
            raise UnsupportedModel(
                f"family {family!r} with a language model {text!r} is not written down here, nor all options of others"
            )
        raise not_causal(family, checkpoint.config)
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_class(family, MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)], hf_config.get_text_config())


def kinds_of(text_config: Any) -> Sequence[str]:
    """The types of all layers, as far as a configuration names them: under today's name, or Nemotron-H's."""
    named = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None)
    return named if isinstance(named, (list, tuple)) else ()


def check_class(family: str, kind: Any, text_config: Any) -> None:
    """Refuse a model class whose attention is out of our reach. Raises `UnsupportedModel`."""
    if getattr(kind, "_is_stateful", False) and not _only_attends(text_config):
        raise _keeps_state(family)
    if not (getattr(kind, "_supports_attention_backend", False) or kind._can_set_attn_implementation()):
        raise UnsupportedModel(f"family {family!r} does not route its attention through transformers' interface")


def check_module(family: str, module: Any) -> None:
    """`check_class` of a loaded model, whose layers show whether they keep state. Raises `UnsupportedModel`."""
    check_class(family, type(module), module.config.get_text_config())
    if getattr(module, "_is_stateful", False):
        if any(isinstance(part, torch.nn.Conv1d) for part in module.modules()):
            raise _keeps_state(family)
        if any(name.endswith(_STATE_WEIGHTS) for name, _ in module.named_parameters()):
            raise _keeps_state(family)


def _only_attends(text_config: Any) -> bool:
    """A family whose layers may be of either kind (Granite 4), with none that keeps state."""
    kinds = kinds_of(text_config)
    return len(kinds) > 0 and all(kind in _ATTENTION_LAYERS for kind in kinds)


def _keeps_state(family: str) -> UnsupportedModel:
    return UnsupportedModel(f"family {family!r} keeps recurrent state (Mamba or linear attention)")


def _has_chunks(described: DecoderConfig | None) -> bool:
    """Whether layers of it see their own chunk of positions and none before it."""
    layers = () if described is None else described.layers
    return any(getattr(layer.attention, "chunk", None) is not None for layer in layers)
