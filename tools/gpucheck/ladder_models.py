"""Files that a ladder's engines need beside config.json: adapters and a tokenizer, made up, of a real model's size."""

from __future__ import annotations

import itertools
import json
import random
import string
from pathlib import Path
from typing import Any

import torch

from tools.gpucheck.shapes import Shape

_RANK = 16
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 30},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 9999},
        "available": {"type": "boolean"},
    },
    "required": ["name", "quantity", "available"], "additionalProperties": False,
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": _ITEM, "minItems": 1}, "comment": {"type": "string"}},
    "required": ["items", "comment"], "additionalProperties": False,
}  # fmt: skip


def make_adapters(shape: Shape, count: int, folder: Path) -> dict[str, Path]:
    """Random adapters of rank 16 on the attention of every layer, as peft saves them."""
    from safetensors.torch import save_file

    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    targets = {"q_proj": (shape.hidden, query), "k_proj": (shape.hidden, key), "v_proj": (shape.hidden, key),
               "o_proj": (query, shape.hidden)}  # fmt: skip
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(targets),
        "base_model_name_or_path": "random",
    }  # fmt: skip
    made = {}
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer, (target, (inputs, outputs)) in itertools.product(range(shape.layers), targets.items()):
            place = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{place}.lora_A.weight"] = torch.randn((_RANK, inputs), generator=generator) * inputs**-0.5
            tensors[f"{place}.lora_B.weight"] = torch.randn((outputs, _RANK), generator=generator) * 0.02
        path = made[f"a{index}"] = folder / f"adapter-{index}"
        path.mkdir(parents=True)
        halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(halves, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def write_tokenizer(vocab: int, folder: Path) -> None:
    """Write a tokenizer of single bytes and of random strings of two to five printable characters, `vocab` in all; the
    last one ends an output."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(symbols)
    generator = random.Random(0)
    characters = [*string.ascii_letters * 3, *string.digits, *string.punctuation, "Ġ", "Ġ", "Ġ"]
    while len(words) < vocab - 1:
        words["".join(generator.choices(characters, k=generator.randint(2, 5)))] = None
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "eos_token_id": vocab - 1}), encoding="utf-8")
