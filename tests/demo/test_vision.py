"""The demo model that reads pictures: the same in transformers, and right about pictures as a reader draws them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw

from asyncengine import Engine
from asyncengine.demo import VISION_PATH
from asyncengine.integrations.cli.main import main
from makers.demo_vision.build_tokenizer import IMAGE
from makers.demo_vision.evaluate import answer, held_out
from makers.demo_vision.idefics import PLACED, TOKENS
from makers.demo_vision.questions import MAKERS

FLAGS = ("--num-threads", "1", "--kv-cache-memory", "8MiB")


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine.from_pretrained(
        "demo-vision", dtype="float32", num_threads=1, kv_cache_memory="16MiB", show_progress=False
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(VISION_PATH, dtype=torch.float32).eval()


def red_circle() -> Image.Image:
    """A picture as a reader of the documentation draws it."""
    image = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(image).ellipse((60, 60, 140, 140), fill="red")
    return image


@torch.inference_mode()
def test_the_engine_gives_the_answers_of_the_reference(engine: Engine, reference: Any) -> None:
    """Pixels are the processor's own, and so is the text that it puts in the place of a picture."""
    processor = transformers.AutoImageProcessor.from_pretrained(VISION_PATH, backend="pil")
    tokenizer = transformers.AutoTokenizer.from_pretrained(VISION_PATH)
    holder: Any = type("Holder", (), {
        "fake_image_token": "<fake_token_around_image>", "image_token": IMAGE, "image_seq_len": TOKENS,
        "global_image_token": "<global-img>", "global_image_tag": "<global-img>",
    })  # fmt: skip
    for skill in MAKERS:
        for picture, asked in held_out(skill, 2, seed=12):
            made = processor(images=[picture], return_tensors="pt", return_row_col_info=True)
            assert transformers.Idefics3Processor.replace_image_token(holder, made, 0) == PLACED
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": asked.text}]}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text.replace(IMAGE, PLACED), return_tensors="pt", add_special_tokens=False).input_ids
            found = reference.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=made["pixel_values"], max_new_tokens=64
            )
            wanted = tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
            assert answer(engine, picture, asked.text) == wanted


def test_a_picture_drawn_by_a_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    red_circle().save(tmp_path / "circle.png")
    assert main(["generate", "demo-vision", "What is this?", "--image", str(tmp_path / "circle.png"), *FLAGS]) == 0
    assert capsys.readouterr().out.strip() == "A red circle."
