"""Small random models of several families, with heads of 64 dimensions, which is the least that FlashInfer takes.

Weights are large enough that greedy outputs wander instead of repeating one token, and sliding windows are short enough
that outputs cross them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncengine.demo import MODEL_PATH

VOCAB = 160
TEXT_VOCAB = 2048
"""Size of the demo model's vocabulary."""
WINDOW = 24
RANK = 8


@dataclass(frozen=True, slots=True)
class Family:
    """`make(half)`: the family's config; `half`: for 16-bit weights."""

    name: str
    make: Callable[[bool], Any]


def families() -> list[Family]:
    import transformers as hf

    gemma = {
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    experts = {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return [
        Family("llama", lambda _: hf.LlamaConfig(**_sized(2, 2))),
        Family("qwen2, group of 7", lambda _: hf.Qwen2Config(**_sized(7, 1, hidden_size=448))),
        Family("qwen3", lambda _: hf.Qwen3Config(**_sized(4, 2, tie_word_embeddings=True))),
        Family("gemma2", lambda _: hf.Gemma2Config(**_sized(4, 2, **gemma))),
        Family("phi3", lambda _: hf.Phi3Config(**_sized(4, 1, hidden_size=256, sliding_window=WINDOW))),
        # where rounding may choose other experts nothing is near: in 16 bits every token takes all of them
        Family("qwen3_moe", lambda half: hf.Qwen3MoeConfig(
            **_sized(4, 2, **experts, num_experts_per_tok=4 if half else 2))),
        Family("gpt2", lambda _: hf.GPT2Config(
            vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=2, n_positions=512, bos_token_id=1, eos_token_id=2)),
        Family("gpt-oss, with sinks", lambda _: hf.GptOssConfig(
            **_sized(4, 2, num_local_experts=4, num_experts_per_tok=4, sliding_window=WINDOW,
                     rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                     layer_types=["sliding_attention", "full_attention"]))),
    ]  # fmt: skip


def _sized(heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes,
    }  # fmt: skip


def text_config() -> Any:
    """A Qwen3 whose vocabulary is that of the demo model's tokenizer."""
    from transformers import Qwen3Config

    return Qwen3Config(**_sized(4, 2, vocab_size=TEXT_VOCAB))


def make_checkpoint(config: Any, folder: Path, dtype: torch.dtype, seed: int, *, tokenizer: bool = False) -> Path:
    """Write a random model of `config`, and the demo model's tokenizer beside it if asked for."""
    from transformers.utils import logging

    model = random_model(config, seed).to(dtype)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if bars:
        logging.enable_progress_bar()
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(MODEL_PATH / name, folder / name)
    return folder


def random_model(config: Any, seed: int) -> Any:
    """In float32: every parameter drawn anew, norms near their start, biases small but not zero."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    embedding = {id(part) for part in model.get_input_embeddings().parameters()}
    family = str(config.model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                scaled = "norm" in name or "ln_" in name
                parameter.add_(0.2 * noise if scaled and "weight" in name else 0.1 * noise)
            elif id(parameter) in embedding:
                parameter.copy_(noise * _embedding_scale(family, config.tie_word_embeddings))
            elif "bias" in name:
                parameter.copy_(0.1 * noise)
            else:
                inputs = parameter.shape[0] if family == "gpt2" else parameter.shape[-1]  # GPT-2 stores the transpose
                parameter.copy_(noise * 1.6 / inputs**0.5)
    return model


def _embedding_scale(family: str, tied: bool) -> float:
    """A tied output would just repeat its input if embeddings were large; Gemma scales its own up."""
    if family.startswith("gemma"):
        return 0.02
    return 0.1 if tied else 1.0


def make_adapter(model_folder: Path, folder: Path, seed: int) -> Path:
    """A random adapter on every linear of the layers, as peft would save it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    targets: dict[str, None] = {}
    with safe_open(model_folder / "model.safetensors", framework="pt") as weights:
        for name in sorted(weights.keys()):
            module, _, kind = name.rpartition(".")
            if kind != "weight" or not module.endswith("_proj"):
                continue
            outputs, inputs = weights.get_slice(name).get_shape()
            targets[module.rpartition(".")[2]] = None
            a = torch.randn((RANK, inputs), generator=generator) * inputs**-0.5
            b = torch.randn((outputs, RANK), generator=generator) * 0.3
            tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": sorted(targets),
        "base_model_name_or_path": "random",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
