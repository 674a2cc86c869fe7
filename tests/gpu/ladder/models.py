"""Files that a ladder's engines need beside config.json: adapters, quantized weights and a tokenizer, made up, of a
real model's size."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .shapes import Shape

_RANK = 16
_BLOCK = 128


def make_adapters(shape: Shape, count: int, folder: Path, *, everywhere: bool) -> dict[str, Path]:
    """Random adapters of rank 16 on the attention of every layer, or on all its linears, as peft saves them."""
    from safetensors.torch import save_file

    hidden, inner, query, key = shape.sizes
    targets = {"self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, key),
               "self_attn.v_proj": (hidden, key), "self_attn.o_proj": (query, hidden)}  # fmt: skip
    if everywhere:
        targets |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    modules = [target.partition(".")[2] for target in targets]
    layers = range(shape.fields["num_hidden_layers"])
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": modules,
        "base_model_name_or_path": "random",
    }  # fmt: skip
    made = {}
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        tensors = {}
        for layer, (target, (inputs, outputs)) in itertools.product(layers, targets.items()):
            place = f"base_model.model.model.layers.{layer}.{target}"
            tensors[f"{place}.lora_A.weight"] = torch.randn((_RANK, inputs), generator=generator) * inputs**-0.5
            tensors[f"{place}.lora_B.weight"] = torch.randn((outputs, _RANK), generator=generator) * 0.02
        path = made[f"a{index}"] = folder / f"adapter-{index}"
        path.mkdir(parents=True)
        halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
        save_file(halves, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def write_fp8(folder: Path, device: torch.device) -> None:
    """Write random weights for the model that `folder` has the config.json of: linears of layers in eight-bit floats
    with a scale for each block of 128 x 128, the rest in bfloat16."""

    def stored(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        if len(shape) != 2 or ".layers." not in name:
            return {name: _random(shape, device)}
        numbers = torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        blocks = [-(-size // _BLOCK) for size in shape]
        scales = torch.full(blocks, shape[1] ** -0.5, dtype=torch.float32)
        return {name: numbers.cpu(), f"{name}_scale_inv": scales}

    _write(folder, stored, {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK],
    })  # fmt: skip


def write_mxfp4(folder: Path, device: torch.device) -> None:
    """Write random weights for the gpt-oss that `folder` has the config.json of: its experts in MXFP4, the rest in
    bfloat16."""

    def stored(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        if len(shape) != 3:
            return {name: _random(shape, device)}
        experts, inputs, outputs = shape  # as transformers holds them; files have rows of inputs, in blocks of 32
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), device=device, dtype=torch.uint8)
        step = 127 - round(math.log2(inputs) / 2) - 2  # numbers are of +-6
        scales = torch.full((experts, outputs, inputs // 32), step, dtype=torch.uint8)
        return {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales}

    _write(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": []})


def _random(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Matrices that keep the size of what they multiply, and vectors near one."""
    drawn = torch.randn(shape, device=device)
    return (drawn * shape[-1] ** -0.5 if len(shape) > 1 else 1 + 0.1 * drawn).to("cpu", torch.bfloat16)


def _write(
    folder: Path, stored: Callable[[str, torch.Size], dict[str, torch.Tensor]], quantization: dict[str, Any]
) -> None:
    """Write `stored` of each of the model's tensors, a file for each layer, and `quantization` into config.json."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    tied = model.config.tie_word_embeddings
    places: dict[str, str] = {}
    for file, names in itertools.groupby(model.state_dict().items(), lambda item: _file_of(item[0])):
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in names:
            if not (tied and name == "lm_head.weight"):
                tensors |= stored(name, tensor.shape)
        if tensors:
            save_file(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "quantization_config": quantization}), encoding="utf-8")


def _file_of(name: str) -> str:
    """A file for each layer, one for what is before all of them and one for the rest."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return f"layer-{layer[1]}.safetensors" if layer else f"{name.rpartition('.')[0]}.safetensors"


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
