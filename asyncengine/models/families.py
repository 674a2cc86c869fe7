"""Which model families run here, decided before and after loading. Every refusal names the family and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from asyncengine.attention.base import LayerSpec
from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.models.attention_function import NAME, Recorder, attach, register
from asyncengine.models.checkpoint import Checkpoint, first_line
from asyncengine.models.kinds import not_causal

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATE_WEIGHTS = ("A_log", "dt_bias", ".A", ".D")
"""Last parts of the names of weights that recurrent layers have and attention has not."""
_PROBE_TOKENS = 7
_PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference to eager attention, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a short forward of the loaded model showed."""

    layers: list[LayerSpec]
    modules: list[Any]
    logits: torch.Tensor
    """[tokens, vocab] of the probe."""
    weights_bytes: int


def load_config(checkpoint: Checkpoint, config: EngineConfig) -> Any:
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
        return AutoConfig.from_pretrained(
            str(checkpoint.folder), trust_remote_code=config.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # config classes validate in many ways, each with its own exception
        raise ModelNotFound(
            f"{checkpoint.folder / 'config.json'} is not a valid {family} config: {first_line(error)}"
        ) from error


def check_config(hf_config: Any, checkpoint: Checkpoint) -> None:
    """Refuse what the config alone shows cannot run. Raises `UnsupportedModel`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = hf_config.model_type
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"family {family!r} is an encoder-decoder; only decoder-only models run here")
    auto_map = checkpoint.config.get("auto_map")
    has_own = isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not has_own:
        raise not_causal(family, checkpoint.config)
    if quantized := checkpoint.config.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
        raise UnsupportedModel(f"quantized checkpoints ({method}) are not supported; use the unquantized weights")
    text_config = hf_config.get_text_config()
    for kind in getattr(text_config, "layer_types", None) or ():
        if kind not in _ATTENTION_LAYERS:
            raise UnsupportedModel(f"family {family!r} has layers of type {kind!r}, which keep no plain KV cache")
    if getattr(text_config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"family {family!r} is set to bidirectional attention")
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_class(family, MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)], text_config)


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
    kinds = getattr(text_config, "layer_types", None) or ()
    return len(kinds) > 0 and all(kind in _ATTENTION_LAYERS for kind in kinds)


def _keeps_state(family: str) -> UnsupportedModel:
    return UnsupportedModel(f"family {family!r} keeps recurrent state (Mamba or linear attention)")


def probe(module: Any, device: torch.device) -> Probed:
    """Run a few tokens under eager attention and under ours and record the layers. Leaves ours set.

    Raises `UnsupportedModel` if ours is not called once per layer or the logits differ.
    """
    family = module.config.model_type
    try:
        with torch.inference_mode():
            tokens, positions = _probe_input(module, device)
            expected = module(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        register()
        module.set_attn_implementation(NAME)
        found, recorder = run_recorded(module, device)
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise UnsupportedModel(
            f"family {family!r} does not run on flat, unpadded batches: {first_line(error)}"
        ) from error
    if module.config.get_text_config()._attn_implementation != NAME:
        raise UnsupportedModel(f"family {family!r} does not let its attention be set")
    _check_layers(module, recorder)
    if not agree(expected, found):
        raise UnsupportedModel(f"family {family!r} computes more in its attention than the interface passes on")
    weights = {part.data_ptr(): part.numel() * part.itemsize for part in module.parameters()}
    return Probed(recorder.specs, recorder.modules, found, sum(weights.values()))


def run_recorded(module: Any, device: torch.device) -> tuple[torch.Tensor, Recorder]:
    """A short forward through our attention function, outside of any runner: logits [tokens, vocab]."""
    recorder = Recorder()
    for part in module.modules():
        attach(part, recorder)
    try:
        with torch.inference_mode():
            tokens, positions = _probe_input(module, device)
            keep = torch.arange(_PROBE_TOKENS, device=device)
            output = module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep)
            logits: torch.Tensor = output.logits[0]
    finally:
        for part in module.modules():
            attach(part, None)
    return logits, recorder


def agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Equal up to the rounding that a whole model accumulates in its type."""
    difference = float((expected.float() - found.float()).abs().max())
    return difference <= _PROBE_ERROR[expected.dtype] * float(expected.float().abs().max())


def _probe_input(module: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = module.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=device).remainder_(vocabulary)[None]
    return tokens, torch.arange(_PROBE_TOKENS, device=device)[None]


def _check_layers(module: Any, recorder: Recorder) -> None:
    family, text_config = module.config.model_type, module.config.get_text_config()
    modules = recorder.modules
    if len(modules) != text_config.num_hidden_layers or len({id(part) for part in modules}) != len(modules):
        raise UnsupportedModel(
            f"family {family!r} calls attention {len(modules)} times in {text_config.num_hidden_layers} layers"
        )
    kinds = getattr(text_config, "layer_types", None)
    slides = getattr(text_config, "use_sliding_window", True)
    for spec in recorder.specs:
        sliding = slides if kinds is None else kinds[spec.index] == "sliding_attention"
        if sliding and getattr(text_config, "sliding_window", None) and spec.window is None:
            raise UnsupportedModel(f"family {family!r} does not say which of its layers slide")
