"""config.json of the commonest families, read without transformers: importing its configuration classes takes longer
than loading a small model, for they import torch.distributed and torch._dynamo.

Only what is certain is read here: every key must be known, of its type, and mean the same as it does to transformers'
class, whose defaults fill in what is missing (`tests/models/test_plain_config.py` compares both). Anything else, a new
key or a scaled rotation, makes it None: transformers reads the file, and says what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

_WHOLE, _NUMBER, _FLAG, _TEXT = (int,), (int, float), (bool,), (str,)
_IDS = (int, list, type(None))

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SHARED: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys((*_SIZES, "max_position_embeddings"), _WHOLE),
        "num_key_value_heads": (int, type(None)), "hidden_act": _TEXT, "rms_norm_eps": (float,),
        "initializer_range": (float,), "attention_dropout": _NUMBER, "use_cache": _FLAG, "tie_word_embeddings": _FLAG,
        "pad_token_id": (int, type(None)), "bos_token_id": (int, type(None)), "eos_token_id": _IDS,
    }
)  # fmt: skip
"""Of all families here: fields by the types they may have."""
_SILENT: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "model_type": _TEXT, "architectures": (list,), "transformers_version": _TEXT, "rope_theta": _NUMBER,
        "rope_parameters": (dict,),
    }
)  # fmt: skip
"""What may stand in any file, and is looked at on its own or not at all."""
_NEVER = ("rope_scaling",)
"""What may stand there as null."""
_DTYPES = ("dtype", "torch_dtype")
_QUANTIZATION = ("quantization_config", "compression_config")
"""What a matrix is stored as: `models.formats` has read it, and refused what it does not know, before this is asked."""
_QWEN: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
        "max_position_embeddings": 32768, "layer_types": None,
    }
)  # fmt: skip
_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {
            "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False, "head_dim": None,
            "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "max_position_embeddings": 2048,
        },
        "mistral": {
            "num_key_value_heads": 8, "head_dim": None, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 4096,
            "max_position_embeddings": 4096 * 32,
        },
        "qwen2": _QWEN,
        "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    }
)  # fmt: skip
"""By family, its fields beside the shared ones, and the defaults of its class that are not those below."""
_OWN: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "head_dim": (int, type(None)), "attention_bias": _FLAG, "mlp_bias": _FLAG, "pretraining_tp": (int, type(None)),
        "sliding_window": (int, type(None)), "use_sliding_window": _FLAG, "max_window_layers": _WHOLE,
        "layer_types": (list,),
    }
)  # fmt: skip
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "attention_dropout": 0.0,
        "use_cache": True, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None,
        "eos_token_id": None,
    }
)  # fmt: skip
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "pad_token_id", "bos_token_id", "eos_token_id")
_KINDS = ("full_attention", "sliding_attention")
_THETA = 10_000.0


class PlainConfig(SimpleNamespace):
    """The attributes that transformers' config object of the same file has, as far as anything here reads them."""

    def get_text_config(self) -> PlainConfig:
        return self


def plain_config(content: Mapping[str, Any], name: str = "") -> PlainConfig | None:
    """What `content` of the config.json of the model `name` says; None: transformers has to read it."""
    family = content.get("model_type")
    own = _MODELS.get(family) if isinstance(family, str) else None
    if own is None or any(size not in content for size in _SIZES):
        return None
    known = {**_SHARED, **_SILENT, **{field: _OWN[field] for field in own if field in _OWN}}
    defaults = {**_DEFAULTS, **own}
    values = dict(defaults)
    for field, value in content.items():
        if (field in _NEVER and value is None) or (field in _DTYPES and _is_dtype(value)):
            continue
        if field in _QUANTIZATION and isinstance(value, dict) and value:
            continue
        if field not in known or not _fits(value, known[field]) or (value is None and not _nullable(field, defaults)):
            return None
        values[field] = value
    theta = _theta(values)
    config = PlainConfig(**values)
    if theta is None or not _sensible(config):
        return None
    config.dtype = content.get("dtype") or content.get("torch_dtype")
    config.num_key_value_heads = config.num_key_value_heads or config.num_attention_heads
    config.rope_parameters = {"rope_theta": theta, "rope_type": "default"}
    config._name_or_path = name
    _complete(config)
    return config


def _complete(config: PlainConfig) -> None:
    """What the classes work out themselves."""
    if getattr(config, "head_dim", 1) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    if hasattr(config, "use_sliding_window"):
        config.sliding_window = config.sliding_window if config.use_sliding_window else None
        first = config.max_window_layers if config.sliding_window is not None else config.num_hidden_layers
        kinds = [_KINDS[layer >= first] for layer in range(config.num_hidden_layers)]
        config.layer_types = config.layer_types or kinds


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    """A bool is no whole number here, and every number is a finite one."""
    if isinstance(value, list):
        return list in types and all(isinstance(each, (int, str)) and not isinstance(each, bool) for each in value)
    if isinstance(value, bool) and bool not in types:
        return False
    return isinstance(value, (*types, type(None))) and not (isinstance(value, float) and not math.isfinite(value))


def _nullable(field: str, defaults: Mapping[str, Any]) -> bool:
    """`sliding_window` may be null whatever its default is; the others where the class says so by theirs."""
    return field == "sliding_window" or (field in _MAY_BE_NULL and (defaults[field] is None or field.endswith("_id")))


def _is_dtype(value: Any) -> bool:
    return value is None or value in ("float32", "bfloat16", "float16")


def _theta(values: dict[str, Any]) -> float | None:
    """The base of a rotation that is not scaled; None: there is more to it. Takes it out of `values`."""
    parameters = values.pop("rope_parameters", {})
    outside = values.pop("rope_theta", _THETA)
    theta = parameters.get("rope_theta", outside)
    plain = set(parameters) <= {"rope_theta", "rope_type"} and parameters.get("rope_type", "default") == "default"
    return theta if plain and isinstance(theta, _NUMBER) and not isinstance(theta, bool) and theta > 0 else None


def _sensible(config: PlainConfig) -> bool:
    """Whether transformers would have nothing to say about the sizes."""
    heads = config.num_attention_heads
    sizes = [getattr(config, name) for name in (*_SIZES, "max_position_embeddings")]
    sizes += [getattr(config, name, None) or 1 for name in ("num_key_value_heads", "head_dim", "sliding_window")]
    if any(size < 1 for size in sizes) or config.hidden_size % heads or heads % (config.num_key_value_heads or heads):
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and (len(kinds) != config.num_hidden_layers or any(kind not in _KINDS for kind in kinds)):
        return False
    if isinstance(config.eos_token_id, list) and not all(isinstance(each, int) for each in config.eos_token_id):
        return False
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return bool(dim % 2 == 0 and 0.0 <= config.initializer_range <= 1.0 and config.rms_norm_eps > 0)
