"""transformers' class of a family: the configuration that it reads, and whether a model of it can run here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.families import MULTIMODAL
from asyncengine.execution.models.formats import CheckpointSource, first_line
from asyncengine.execution.models.refusals import misnamed, not_causal

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATE_WEIGHTS = ("A_log", "dt_bias", ".A", ".D")
"""Last parts of the names of weights that recurrent layers have and attention has not."""


def load_config(checkpoint: CheckpointSource, trust_remote_code: bool) -> Any:
    """transformers' config object. Raises `UnsupportedModel` for an unknown family or one that needs its own code."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelNotFound(f"{checkpoint.folder / 'config.json'} names no model_type")
    if family not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        if checkpoint.config.get("auto_map"):
            raise UnsupportedModel(
                f"family {family!r} needs code from the model's folder; trust_remote_code=True would run it"
            )
        raise UnsupportedModel(f"family {family!r} is not known to the installed transformers")
    try:
        if checkpoint.metadata or "decision_head" in checkpoint.config:  # which is not what the file has
            return AutoConfig.for_model(**checkpoint.config)
        return AutoConfig.from_pretrained(
            str(checkpoint.folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # config classes validate in many ways, each with its own exception
        if named := misnamed(checkpoint.config):
            raise named from error
        raise ModelNotFound(
            f"{checkpoint.folder / 'config.json'} is not a valid {family} config: {first_line(error)}"
        ) from error


def check_family(hf_config: Any, checkpoint: CheckpointSource) -> None:
    """Refuse a family that transformers does not have as a causal language model, or not within our reach, and
    quantized weights. Raises `UnsupportedModel`."""
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
    if kinds := sorted(set(checkpoint.stored_kinds().values())):
        raise UnsupportedModel(
            f"family {family!r} runs through transformers' modules here, which take no quantized weights "
            f'({", ".join(kinds)}); use the unquantized weights, with quantization="int8" or "int4" if they are '
            "too large"
        )


def kinds_of(text_config: Any) -> Sequence[str]:
    """The type of each layer, under today's name or Nemotron-H's; empty where a configuration names none."""
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
    return len(kinds) > 0 and all(kind in ATTENTION_LAYERS for kind in kinds)


def _keeps_state(family: str) -> UnsupportedModel:
    return UnsupportedModel(f"family {family!r} keeps recurrent state (Mamba or linear attention)")
