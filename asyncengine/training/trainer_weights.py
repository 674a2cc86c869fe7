"""The weights of a trainer's model by the names of its checkpoint, and the adapter that PEFT trains on top of them."""

from __future__ import annotations

from typing import Any

import torch

from asyncengine.errors import UnsupportedModel


def base_of(model: torch.nn.Module) -> Any:
    """The causal language model of transformers that a PEFT model wraps, or the model itself."""
    inner: Any = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def base_weights(base: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every floating-point tensor of the model, without what PEFT has put in. A tied matrix comes once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in base.state_dict().items():
        if ".lora_" in name or not tensor.is_floating_point() or (tensor.data_ptr(), tensor.shape) in seen:
            continue
        if ".modules_to_save." in name:
            raise UnsupportedModel(f"an exact trainer takes no modules_to_save, and the model has {name}")
        seen.add((tensor.data_ptr(), tensor.shape))
        found[name.replace(".base_layer.", ".")] = tensor
    return found


def versions_of(module: torch.nn.Module, adapters: bool) -> list[tuple[int, int]]:
    """Numbers that change when a tensor of the model, or of PEFT's adapters in it, is exchanged or written in place."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(tensor.data_ptr(), tensor._version) for name, tensor in named if (".lora_" in name) == adapters]


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
    name: str = names[0]
    return name


def take_adapter(model: Any, name: str) -> tuple[dict[str, torch.Tensor], Any, int]:
    """(tensors by PEFT's names, configuration, the largest rank) of an adapter."""
    from peft import get_peft_model_state_dict

    rank = max(layer.r[name] for layer in _lora_layers(model) if name in layer.r)
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return tensors, model.peft_config[name], rank


def _lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "merged")]
