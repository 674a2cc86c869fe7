"""The export of the demo model that reads pictures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from asyncengine.demo import VISION_PATH
from tools.demo_vision.build_tokenizer import END
from tools.demo_vision.idefics import PICTURE, PLACED, TOKENS, export, features, hidden_states, pixels
from tools.demo_vision.scenes import Scene, draw, scene
from tools.demo_vision.train import Options, Trainer


def scenes(seed: int, count: int, held_out: bool) -> list[Scene]:
    rng = random.Random(seed)
    return [scene(rng, held_out) for _ in range(count)]


def new_trainer(tower_steps: int = 0) -> Trainer:
    tokenizer = Tokenizer.from_file(str(VISION_PATH / "tokenizer.json"))
    return Trainer(Options(pictures=8, conversations=4, warmup=2, tower_steps=tower_steps, known=100), tokenizer)


@torch.inference_mode()
def test_what_is_exported_is_what_was_trained(tmp_path: Path) -> None:
    trainer = new_trainer()
    for parameter in trainer.model.parameters():
        parameter.copy_(parameter.bfloat16().float())  # so that export loses nothing
    export(trainer.model, tmp_path)
    served: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    picture = pixels([draw(scenes(7, 1, False)[0], random.Random(0))])
    ids = torch.tensor([trainer.tokenizer.encode(f"<|user|>{PLACED}What is this?{END}<|assistant|>").ids])
    assert int((ids == PICTURE).sum()) == TOKENS
    wanted = trainer.model.lm_head(hidden_states(trainer.model, ids, features(trainer.model, picture)))
    found = served(ids, pixel_values=picture[:, None]).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
