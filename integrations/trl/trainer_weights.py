"""The weights of a trainer's model by the names of its checkpoint, and the adapter that PEFT trains on top of them."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.errors import UnsupportedModel

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""Names that wrappers put anywhere into a parameter's name: activation checkpointing, FSDP, `torch.compile`."""


def checkpoint_name(name: str, adapter: str = "default", tuner: str = "lora_") -> str | None:
    """The name that a checkpoint has for the parameter `name` of a wrapped model.

    Names are compared between their dots, so a layer called `submodule` is kept. None: the parameter is in no
    checkpoint, because it belongs to a PEFT adapter (to its matrices, whose names begin with `tuner`, or to the copy of
    a module that another adapter than `adapter` trains) or was replaced by the adapter's copy of its module.

    >>> checkpoint_name("module.base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    >>> checkpoint_name("base_model.model.lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    segments = [segment for segment in name.split(".") if segment not in WRAPPERS]
    while segments[0] == "module" and len(segments) > 1:  # of DistributedDataParallel or DeepSpeed
        del segments[0]
    if segments[:2] == ["base_model", "model"]:
        del segments[:2]
    if "modules_to_save" in segments:
        at = segments.index("modules_to_save")
        if segments[at + 1] != adapter:
            return None
        del segments[at : at + 2]
    if "original_module" in segments or any(segment.startswith(tuner) for segment in segments):
        return None
    return ".".join(segment for segment in segments if segment != "base_layer")


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights that a checkpoint of `model` would have, by the checkpoint's names: parameters and saved buffers.

    Wrappers' prefixes are taken off, tensors distributed over processes are gathered, and what transformers fuses while
    it loads (the experts of a mixture) is taken apart again. Adapters are left out, so merge them first. Where nothing
    has to be computed, tensors are the model's own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    adapter, tuner = active_adapter(model), getattr(model, "prefix", "lora_")
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        clean = checkpoint_name(name, adapter, tuner)
        if clean is not None and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            weights[clean] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    inner = base_of(model)
    return revert_weight_conversion(inner, weights) if hasattr(inner, "config") else weights


def active_adapter(model: torch.nn.Module) -> str:
    """Name of the adapter that a PEFT model trains; "default" for any other model."""
    active = getattr(model, "active_adapter", "default")
    return active if isinstance(active, str) else "default"


def base_of(model: torch.nn.Module) -> Any:
    """The transformers model inside of wrappers and PEFT."""
    inner: Any = model
    for name in ("_orig_mod", "module"):
        inner = getattr(inner, name, inner)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def exact_weights(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`named_weights` of the model below the adapters. Raises `UnsupportedModel` where an adapter has modules of its
    own in the place of the model's."""
    name = next((name for name, _ in base.named_parameters() if ".modules_to_save." in name), None)
    if name is not None:
        raise UnsupportedModel(f"an exact trainer takes no modules_to_save, and the model has {name}")
    return named_weights(base)


def versions_of(module: torch.nn.Module, adapters: bool) -> list[tuple[int, int]]:
    """Numbers that change when a tensor of the model, or of PEFT's adapters in it, is exchanged or written in place."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [(tensor.data_ptr(), tensor._version) for name, tensor in tensors if (".lora_" in name) == adapters]


def adapter_on(model: Any) -> str | None:
    """The name of the adapter of a PEFT model that is on; None: there is none, or it is switched off.

    Raises `UnsupportedModel` where several are on, or one is merged into the weights or no LoRA.
    """
    layers = _lora_layers(model)
    if not hasattr(model, "peft_config") or all(layer.disable_adapters for layer in layers):
        return None
    names = model.active_adapters
    if any(layer.merged for layer in layers) or len(names) != 1 or model.peft_config[names[0]].peft_type != "LORA":
        raise UnsupportedModel("an exact trainer takes one LoRA adapter at a time, not merged into the weights")
    return names[0]


def take_adapter(model: Any, name: str) -> tuple[dict[str, torch.Tensor], Any, int]:
    """(tensors by PEFT's names, configuration, the largest rank) of an adapter."""
    from peft import get_peft_model_state_dict

    rank = max(layer.r[name] for layer in _lora_layers(model) if name in layer.r)
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return tensors, model.peft_config[name], rank


def _lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "merged")]
