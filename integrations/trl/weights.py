"""Weights of a model in training, under the names of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""Names that wrappers put anywhere into a parameter's name: activation checkpointing, FSDP, `torch.compile`."""


def checkpoint_name(name: str, adapter: str = "default", tuner: str = "lora_") -> str | None:
    """The name that a checkpoint has for the parameter `name` of a wrapped model.

    Names are cut at their dots, so that a layer that is called `submodule` stays what it is. None: the parameter is in
    no checkpoint, because it belongs to a PEFT adapter (to its matrices, whose names begin with `tuner`, or to the copy
    of a module that another one than `adapter` trains) or was replaced by the adapter's copy of its module.

    >>> checkpoint_name("module.base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    >>> checkpoint_name("base_model.model.lm_head.modules_to_save.default.weight")
    'lm_head.weight'
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:  # of DistributedDataParallel or DeepSpeed
        del parts[0]
    if parts[:2] == ["base_model", "model"]:
        del parts[:2]
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1] != adapter:
            return None
        del parts[at : at + 2]
    if "original_module" in parts or any(part.startswith(tuner) for part in parts):
        return None
    return ".".join(part for part in parts if part != "base_layer")


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
    inner = _unwrapped(model)
    return revert_weight_conversion(inner, weights) if hasattr(inner, "config") else weights


def active_adapter(model: torch.nn.Module) -> str:
    """Name of the adapter that a PEFT model trains; "default" for any other model."""
    active = getattr(model, "active_adapter", "default")
    return active if isinstance(active, str) else "default"


def _unwrapped(model: torch.nn.Module) -> Any:
    """The transformers model inside of wrappers and PEFT."""
    inner: Any = model
    for name in ("_orig_mod", "module"):
        inner = getattr(inner, name, inner)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@contextmanager
def merged(model: Any) -> Iterator[None]:
    """Merge the PEFT adapter into `model` meanwhile. The weights below it are put back as they were, to the bit:
    subtracting what was added would leave a rounding error behind at every step of a training."""
    kept = {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if "base_layer" in name and tensor.is_floating_point()
    }
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, tensor in kept.items():
                model.get_parameter(name).copy_(tensor)
