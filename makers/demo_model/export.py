"""Writes a training checkpoint as an ordinary Hugging Face model folder: ``python -m makers.demo_model.export``."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from asyncengine.demo import DRAFT_PATH, MODEL_PATH
from makers.demo_model.llama import DRAFT, Llama, Shape, hf_config, hf_state

PAD, EOS = 0, 2


def export(checkpoint: Path, folder: Path = MODEL_PATH, shape: Shape | None = None) -> None:
    """Weights in bfloat16, both configurations, and the tokenizer files when the folder lacks them. The model that
    guesses has the demo model's."""
    state = torch.load(checkpoint, weights_only=True)["model"]
    shape = replace(shape or Shape(), vocab_size=state["embed"].shape[0])
    model = Llama(shape)
    model.load_state_dict(state)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in hf_state(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    generation = {"do_sample": False, "eos_token_id": [EOS, PAD], "pad_token_id": PAD, "max_new_tokens": 256}
    write_json(folder / "config.json", hf_config(shape, bos=None, eos=EOS, pad=PAD))
    write_json(folder / "generation_config.json", generation)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if shape.hidden != DRAFT.hidden and not (folder / name).exists():
            shutil.copy(MODEL_PATH / name, folder / name)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path(".demo-train/checkpoint.pt"))
    parser.add_argument("--draft", action="store_true", help="the small model that guesses for the demo model")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    default, shape = (DRAFT_PATH, DRAFT) if arguments.draft else (MODEL_PATH, Shape())
    export(arguments.checkpoint, arguments.output or default, shape)


if __name__ == "__main__":
    main()
