"""The demo model as GGUF files: F16, Q8_0 and the mix that llama.cpp calls Q4_K_M.

    python tests/support/demo_gguf.py FOLDER

Its tokenizer goes along as tokenizer.json under `tokenizer.huggingface.json`, and as words and merges.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import asyncengine.demo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.gguf_files import write_gguf
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
    whole = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
    content = json.loads(whole)
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    words = {number: word for word, number in content["model"]["vocab"].items()}
    words |= {number: entry["content"] for number, entry in added.items()}
    count = AutoConfig.from_pretrained(DEMO).vocab_size
    kinds = [
        gguf.TokenType.UNUSED if number not in words
        else gguf.TokenType.CONTROL if number in added and added[number]["special"]
        else gguf.TokenType.USER_DEFINED if number in added
        else gguf.TokenType.NORMAL
        for number in range(count)
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [words.get(number, f"[PAD{number}]") for number in range(count)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.eot_token_id": np.uint32(2).item(),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.huggingface.json": whole,
        "tokenizer.chat_template": (DEMO / "chat_template.jinja").read_text(encoding="utf-8"),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for mix in MIXES:
        write_demo(folder / f"demo-{mix}.gguf", mix)
        print(folder / f"demo-{mix}.gguf")
