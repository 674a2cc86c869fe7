"""The demo model that reads pictures: small, the same in transformers, and right about pictures it never saw."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors import safe_open

from asyncengine import Engine
from asyncengine.cli.main import main
from asyncengine.demo import VISION_PATH
from tools.demo_vision.build_tokenizer import IMAGE
from tools.demo_vision.evaluate import GREEDY, answer, held_out, measure
from tools.demo_vision.idefics import PLACED, TOKENS
from tools.demo_vision.questions import MAKERS

CARD = (VISION_PATH / "README.md").read_text(encoding="utf-8")
FOLDER_LIMIT = 3_000_000
COUNT = 20
"""Questions of each skill. The card has the rates of more."""
LEAST, LEAST_OF_ALL = 0.4, 0.75
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


def test_folder_is_small_and_complete() -> None:
    files = {path.name for path in VISION_PATH.iterdir()}
    assert files == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum((VISION_PATH / name).stat().st_size for name in files) <= FOLDER_LIMIT
    with safe_open(VISION_PATH / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_held_out_pictures(engine: Engine) -> None:
    wrong = measure(engine, COUNT, seed=11)
    assert all(len(failures) <= (1 - LEAST) * COUNT for failures in wrong.values()), wrong
    assert sum(map(len, wrong.values())) <= (1 - LEAST_OF_ALL) * COUNT * len(MAKERS), wrong


def test_the_card_states_every_rate() -> None:
    rates = dict(re.findall(r"\(`([\w ]+)`\) \| ([\d.]+) %", CARD))
    assert set(rates) == set(MAKERS)
    assert all(60 < float(rate) <= 100 for rate in rates.values())


@torch.inference_mode()
def test_the_engine_gives_the_answers_of_the_reference(engine: Engine, reference: Any) -> None:
    """With the processor's own pixels, and the text that transformers' processor puts in the place of a picture."""
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


def test_a_conversation_about_two_pictures(engine: Engine) -> None:
    square = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(square).rectangle((10, 10, 40, 40), fill="blue")
    messages: list[dict[str, Any]] = []
    for shown, text, wanted in (
        (red_circle(), "What is this?", "A red circle."),
        (None, "Where is the circle?", "In the center."),
        (square, "What is this?", "A blue square."),
        (None, "What color is the square?", "It is blue."),
    ):
        parts = [] if shown is None else [{"type": "image", "image": shown}]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})
        found = engine.chat(messages, GREEDY).text
        assert found == wanted
        messages.append({"role": "assistant", "content": found})


def test_without_a_picture_it_says_so(engine: Engine) -> None:
    found = [engine.chat([{"role": "user", "content": text}], GREEDY).text for text in ("What is this?", "How many?")]
    assert found == ["There is no picture."] * 2
