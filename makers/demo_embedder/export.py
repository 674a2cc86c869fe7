"""Writes the trained encoder as a sentence-transformers folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncengine.demo import EMBEDDER_PATH
from makers.demo_embedder.bert import MAX_TOKENS, PROMPTS

MODULES = ("Transformer", "Pooling", "Normalize")


def export(model: Any, folder: Path = EMBEDDER_PATH) -> None:
    """Weights in bfloat16, the configurations, and the tokenizer's files where the folder lacks them."""
    write_weights(model, folder)
    config = {**model.config.to_dict(), "architectures": ["BertModel"], "dtype": "bfloat16"}
    write_json(folder / "config.json", {name: config[name] for name in sorted(config) if name not in _DROPPED})
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    write_json(folder / "modules.json", modules)
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write_json(folder / "1_Pooling" / "config.json", pooling)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    prompts = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).exists():
            shutil.copy(EMBEDDER_PATH / name, folder / name)


_DROPPED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "_attn_implementation"})


def write_weights(model: Any, folder: Path) -> None:
    """Make the folder, and write the model's weights there in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
