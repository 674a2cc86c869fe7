"""Chats with pictures through the whole engine: at once, again, with tools of the trade beside them, and refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.picture_models import IMAGE, chat, picture, png, save_picture_model, words

from asyncengine import AsyncEngine, Engine, InvalidParameter, RequestFailed, SamplingParams
from asyncengine.execution.models.vision.tower import TransformersTower

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory": "16MiB", "show_progress": False, "num_threads": 1, "max_images": 3,
    "max_image_side": 300,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("qwen3_vl")
    save_picture_model("qwen3_vl", made)
    return made


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of hidden states of the pictures that are encoded, in order."""
    made: list[int] = []
    encode = TransformersTower.encode

    def noted(self: TransformersTower, pixels: Any) -> Any:
        found = encode(self, pixels)
        made.append(len(found.features))
        return found

    monkeypatch.setattr(TransformersTower, "encode", noted)
    return made


def square(color: str) -> Image.Image:
    return Image.new("RGB", (32, 32), color)


async def test_colours_that_are_asked_for_at_once_are_never_mixed(folder: Path, towers: list[int]) -> None:
    colours = ("red", "green", "blue")
    async with await AsyncEngine.from_pretrained(folder, **SETTINGS) as engine:
        assert engine.info.no_images is None
        assert engine.info.left_out == ()
        alone = {color: (await engine.chat(chat(square(color), "?"), GREEDY)).token_ids for color in colours}
        assert len({tuple(each) for each in alone.values()}) == 3
        for turn in range(4):
            streams = [engine.stream_chat(chat(words(turn, turn), square(each), "?"), GREEDY) for each in colours * 5]
            answers = [(await stream.result()).token_ids for stream in streams]
            assert answers[:3] * 5 == answers
            assert len({tuple(each) for each in answers}) == 3
            if not turn:
                assert answers[:3] == list(alone.values())
    assert len(towers) == 3


def test_questions_about_one_picture_encode_it_once(folder: Path, towers: list[int]) -> None:
    image = png(picture(3))
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    with Engine.from_pretrained(folder, **SETTINGS) as engine:
        first = engine.chat([{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}], GREEDY)
        again = engine.chat([{"role": "user", "content": [part, {"type": "text", "text": "where?"}]}], GREEDY)
        other = engine.chat(chat("where?", Image.open(io.BytesIO(image)), "?"), GREEDY)
        assert first.usage.cached_tokens == 0
        assert again.usage.cached_tokens > 10
        assert other.usage.cached_tokens < 10
        stats = engine.stats().images
        assert stats.encoded == 1
        assert stats.hits >= 1
        assert stats.nbytes == 15 * 4 * 2 * 64  # and one layer's deep features
        assert engine.count_tokens(chat(picture(3), "what?")) == first.usage.prompt_tokens
        assert engine.tokenize(chat(picture(3), "what?")).count(IMAGE) == 15
        params = GREEDY.replace(n=3, repetition_penalty=1.3, logprobs=True)
        assert len(engine.chat(chat(picture(3), "who?"), params).samples) == 3
    assert towers == [15]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([picture(1)] * 4 + ["?"], r"messages\[0\].content\[3\].image: is one picture too many.*max_images=3"),
        ([Image.new("RGB", (301, 5)), "?"], r"content\[0\].image: is 301 x 5.*max_image_side=300"),
        ([Image.new("RGB", (1, 250)), "?"], r"content\[0\].image: cannot be processed for this model"),
        (["<|image|>", picture(1), "?"], r"messages: hold 1 pictures, and '<\|image\|>' stands .* 2 times"),
        (["<|image|>"], r"prompt\[\d+\].*stands for an image: pictures are passed in the messages of a chat"),
    ],
)
def test_refused_in_the_call(parts: Any, says: str, folder: Path) -> None:
    with Engine.from_pretrained(folder, **SETTINGS) as engine:
        with pytest.raises(InvalidParameter, match=says):
            engine.chat(chat(*parts), GREEDY)
        with pytest.raises(InvalidParameter, match="prompt_logprobs"):
            engine.chat(chat(picture(1), "?"), GREEDY.replace(prompt_logprobs=True))
        assert engine.stats().requests["running"] == 0


def test_a_tower_that_fails_ends_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = TransformersTower.encode

    def fails(self: TransformersTower, pixels: Any) -> Any:
        if pixels["image_grid_thw"].prod() == 4 * 8 * 8 // 4:
            raise RuntimeError("no memory for it")
        return encode(self, pixels)

    monkeypatch.setattr(TransformersTower, "encode", fails)
    with Engine.from_pretrained(folder, **SETTINGS) as engine:
        sound = engine.chat(chat(picture(1), "?"), GREEDY)
        for _ in range(2):
            with pytest.raises(RequestFailed, match="could not be encoded: RuntimeError: no memory for it"):
                engine.chat(chat(square("red"), "?"), GREEDY)
        assert engine.chat(chat(picture(1), "?"), GREEDY).token_ids == sound.token_ids


def test_without_pictures_the_tower_takes_no_memory(folder: Path) -> None:
    with Engine.from_pretrained(folder, **SETTINGS) as engine:
        whole = engine.info.weight_bytes
    with Engine.from_pretrained(folder, images="off", **SETTINGS) as engine:
        assert engine.info.weight_bytes < whole
        assert engine.info.no_images == 'images="off"'
        with pytest.raises(InvalidParameter, match=r"content\[0\].type: must be 'text'"):
            engine.chat(chat(picture(1), "?"), GREEDY)


@pytest.mark.parametrize("missing", ["preprocessor_config.json", "chat_template.jinja"])
def test_what_is_in_the_way_of_pictures_is_not_in_the_way_of_text(missing: str, tmp_path: Path) -> None:
    save_picture_model("qwen3_vl", tmp_path)
    (tmp_path / missing).unlink()
    with Engine.from_pretrained(tmp_path, **SETTINGS) as engine:
        assert engine.info.no_images
        assert engine.generate("text", GREEDY).usage.completion_tokens == 8
