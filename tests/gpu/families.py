"""Small random models of several families, with heads of 64 dimensions, which is the least that FlashInfer takes.

Weights are large enough that greedy outputs wander instead of repeating one token, and sliding windows are short enough
that outputs cross them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support.peft_checkpoints import make_peft
from support.tiny_configs import VOCAB, WINDOW, maker_of, rope
from support.tiny_models import randomize, save

from asyncengine.demo import MODEL_PATH

TEXT_VOCAB = 2048
"""Size of the demo model's vocabulary."""
RANK = 8


@dataclass(frozen=True, slots=True)
class Family:
    """`fields` of its configuration beside `_SIZES` and the common ones; `half`: other ones for 16-bit weights."""

    name: str
    fields: Mapping[str, Any]
    half: Mapping[str, Any] = field(default_factory=dict)

    def make(self, half: bool) -> Any:
        return maker_of({**_SIZES, **self.fields, **(self.half if half else {})})()


_SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 64}
_KINDS = ["sliding_attention", "full_attention"]
FAMILIES = [
    Family("llama", {"class": "LlamaConfig", "num_attention_heads": 2}),
    Family("qwen2, group of 7", {
        "class": "Qwen2Config", "hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}),
    Family("qwen3", {"class": "Qwen3Config", "tie_word_embeddings": True}),
    Family("gemma2", {
        "class": "Gemma2Config", "sliding_window": WINDOW, "layer_types": _KINDS, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    Family("phi3", {"class": "Phi3Config", "num_key_value_heads": 1, "hidden_size": 256, "sliding_window": WINDOW}),
    # where rounding may choose other experts nothing is near: in 16 bits every token takes all of them
    Family("qwen3_moe", {
        "class": "Qwen3MoeConfig", "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True,
        "num_experts_per_tok": 2}, {"num_experts_per_tok": 4}),
    Family("gpt2", {
        "class": "GPT2Config", "alone": True, "vocab_size": VOCAB, "n_embd": 128, "n_layer": 2, "n_head": 2,
        "n_positions": 512, "bos_token_id": 1, "eos_token_id": 2}),
    Family("gpt-oss, with sinks", {
        "class": "GptOssConfig", "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": WINDOW,
        "rope_parameters": rope("default"), "layer_types": _KINDS}),
]  # fmt: skip


def family_called(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def text_config() -> Any:
    """A Qwen3 whose vocabulary is that of the demo model's tokenizer."""
    return maker_of({**_SIZES, "class": "Qwen3Config", "vocab_size": TEXT_VOCAB})()


def make_checkpoint(config: Any, folder: Path, dtype: torch.dtype, seed: int, *, tokenizer: bool = False) -> Path:
    """Write a random model of `config`, and the demo model's tokenizer beside it if asked for."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, str(config.model_type), torch.Generator().manual_seed(seed))
    save(model.to(dtype), folder)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(MODEL_PATH / name, folder / name)
    return folder


def make_adapter(model_folder: Path, folder: Path, seed: int) -> Path:
    """A random adapter on every linear of the layers, saved by peft."""
    model = hf.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    make_peft(model, seed, r=RANK, lora_alpha=6 * RANK, target_modules="all-linear").save_pretrained(folder)
    return folder
