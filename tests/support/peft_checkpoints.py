"""Adapters as peft saves them, for tiny random models, with every weight random (peft starts B at zero)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from asyncengine.seams import ModuleDims

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def tiny_llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**sizes, **heads, **changes})).eval()


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2)).eval()


def base_modules(model: Any) -> dict[str, ModuleDims]:
    """Modules of `model` that can take an adapter, with their dimensions."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            head = module is model.get_output_embeddings()
            tied: Any = "" if not head else "tied" if model.config.tie_word_embeddings else "own"
            found[path] = ModuleDims(module.in_features, module.out_features, bias=module.bias is not None, head=tied)
        elif isinstance(module, torch.nn.Embedding):
            found[path] = ModuleDims(module.num_embeddings, module.embedding_dim, "embedding")
        elif type(module).__name__ == "Conv1D":
            found[path] = ModuleDims(module.weight.shape[0], module.weight.shape[1], "conv1d")
    return found


def make_peft(model: Any, seed: int = 0, **config: Any) -> Any:
    """`model` wrapped by peft, with random adapter weights."""
    import peft

    config.setdefault("r", 4)
    config.setdefault("target_modules", ["q_proj", "v_proj"])
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return wrapped


def save_adapter(folder: Path, seed: int = 0, **config: Any) -> Path:
    """An adapter of `tiny_llama` in `folder`, saved by peft."""
    make_peft(tiny_llama(), seed, **config).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / CONFIG
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def split_file(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join_file(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
