"""What the demo model that reads pictures is made by: scenes, pictures, answers, the export."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from asyncengine.demo import VISION_PATH
from tools.demo_vision.build_tokenizer import END
from tools.demo_vision.conversations import conversation
from tools.demo_vision.idefics import PICTURE, PLACED, TOKENS, export, features, hidden_states, pixels
from tools.demo_vision.scenes import COLORS, SIDE, Scene, draw, scene
from tools.demo_vision.train import Options, Trainer


def scenes(seed: int, count: int, held_out: bool) -> list[Scene]:
    rng = random.Random(seed)
    return [scene(rng, held_out) for _ in range(count)]


def test_no_scene_is_on_both_sides() -> None:
    trained, kept = ({each.shapes for each in scenes(0, 2000, side)} for side in (False, True))
    assert len(kept) > 500
    assert not trained & kept
    rng = random.Random(1)
    shown = [each for _ in range(300) for each in conversation(rng, 4).scenes]
    assert len(shown) > 300
    assert not any(each.held_out for each in shown)


def test_pictures_show_what_their_scenes_say() -> None:
    """The middle of the pixels of a shape's color is in its third: what is asked about is what is drawn."""
    rng = random.Random(2)
    for of in scenes(3, 100, False):
        image = draw(of, rng).resize((SIDE, SIDE))
        pixels = np.asarray(image).astype(int)
        for shape in of.shapes:
            if sum(other.color == shape.color for other in of.shapes) > 1:
                continue
            near = np.stack([abs(pixels - tint).sum(2) for tint in COLORS[shape.color]]).min(0) < 60
            rows, columns = (3 * np.median(axis) // SIDE for axis in np.nonzero(near))
            assert (rows, columns) == divmod(shape.cell, 3), (of, shape)


def new_trainer(tower_steps: int = 0) -> Trainer:
    tokenizer = Tokenizer.from_file(str(VISION_PATH / "tokenizer.json"))
    return Trainer(Options(pictures=8, conversations=4, warmup=2, tower_steps=tower_steps, known=100), tokenizer)


def test_only_answers_are_learned() -> None:
    trainer = new_trainer()
    drawn = [conversation(random.Random(seed), 5, PLACED) for seed in range(4)]
    _, targets = trainer._encode(drawn)
    for each, row in zip(drawn, targets, strict=True):
        learned = trainer.tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=False)
        assert learned == "".join(f"{text}{END}" for role, text in each.turns if role == "assistant")


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
