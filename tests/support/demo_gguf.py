"""The demo model as GGUF files: F16, Q8_0 and the mix that llama.cpp calls Q4_K_M.

    python tests/support/demo_gguf.py FOLDER

Its tokenizer goes along as tokenizer.json under `tokenizer.huggingface.json`, and as words and merges.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

import asyncengine.demo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.gguf_files import write_gguf
from support.gguf_metadata import byte_level_metadata
from support.kquants import stored_as

DEMO = Path(asyncengine.demo.__file__).parent / "model"
MIXES = ("F16", "Q8_0", "Q4_K_M")


def demo_weights() -> dict[str, torch.Tensor]:
    return load_file(DEMO / "model.safetensors")


def write_demo(path: Path, mix: str) -> dict[str, torch.Tensor]:
    """Write the model; what its numbers stand for, under transformers' names."""
    config = AutoConfig.from_pretrained(DEMO)

    def kind_of(name: str, tensor: torch.Tensor) -> str:
        if mix != "Q4_K_M":
            return mix
        return stored_as(_q4_k_m(name, config.num_hidden_layers), tensor.shape[-1])

    return write_gguf(path, config, demo_weights(), kind_of, tokenizer_values())


def _q4_k_m(name: str, layers: int) -> str:
    """Q6_K for the embedding that is the output, and for values and down projections of half of the layers."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q6_K"
    if ".attn_v." in name or ".ffn_down." in name:
        layer = int(name.split(".")[1])
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        return "Q6_K" if more else "Q4_K"
    return "Q4_K"


def tokenizer_values() -> dict[str, Any]:
    """Values of a GGUF header that describe the demo model's tokenizer, and its chat template."""
    count = AutoConfig.from_pretrained(DEMO).vocab_size
    values = byte_level_metadata(AutoTokenizer.from_pretrained(DEMO), "default", pad_to=count)
    del values["general.architecture"]  # which the writer says
    whole = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    return {**values, "tokenizer.ggml.eot_token_id": 2, "tokenizer.huggingface.json": whole}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for mix in MIXES:
        write_demo(folder / f"demo-{mix}.gguf", mix)
        print(folder / f"demo-{mix}.gguf")
