"""Saving and restoring a conversation, with the intentions of llama.cpp's `test_slot_save.py` and `--prompt-cache`.

It has no counterpart here to erase a slot: nothing is ever found that a prompt does not begin with.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from support.picture_models import chat, picture, save_picture_model, words

from asyncengine import AsyncEngine, InvalidParameter, SamplingParams
from asyncengine.kvcache.store.record import Header, checksum
from asyncengine.outputs import Completion
from asyncengine.step import RecordPart

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
COMMON = "You are a helpful assistant. " * 12
FRANCE, GERMANY = COMMON + "What is the capital of France?", COMMON + "What is the capital of Germany?"
FIRST_HEAD = 96


async def demo(**settings: Any) -> AsyncEngine:
    return await AsyncEngine.from_pretrained("demo", show_progress=False, check_every=1, **settings)


def processed(answer: Completion) -> int:
    """Tokens of the prompt that were computed."""
    return answer.usage.prompt_tokens - answer.usage.cached_tokens


async def test_a_restored_conversation_processes_what_is_different_alone(tmp_path: Path) -> None:
    file = tmp_path / "slot1.bin"
    async with await demo() as saved, await demo() as restored:
        first = await saved.generate(FRANCE, PARAMS)
        assert processed(first) == first.usage.prompt_tokens, "all tokens are processed"
        count = await saved.export_prefix(FRANCE, file)
        here = await saved.generate(GERMANY, PARAMS)
        assert processed(here) <= 32
        assert await restored.import_prefix(file) == count
        there = await restored.generate(GERMANY, PARAMS)
        assert (processed(there), there.text) == (processed(here), here.text)
        again = await saved.generate(GERMANY, PARAMS)  # what was restored elsewhere has changed nothing here
        assert (processed(again) <= 16, again.text) == (True, here.text)


async def test_restoring_beside_other_conversations_changes_none_of_them(tmp_path: Path) -> None:
    async with await demo() as engine:
        await engine.export_prefix(FRANCE, tmp_path / "slot")
        expected = [await engine.generate(prompt, PARAMS) for prompt in (GERMANY, FRANCE)]
        streams = [engine.stream(prompt, PARAMS) for prompt in (GERMANY, FRANCE)]
        await streams[0].__anext__()
        await engine.import_prefix(tmp_path / "slot")
        assert [(await stream.result()).text for stream in streams] == [answer.text for answer in expected]
        engine.core.loop.scheduler.check()


def about_of(data: bytes) -> tuple[Header, dict[str, Any], int]:
    """Header and content of a file's description, and the offset behind it."""
    header, begin = Header.unpack(data)
    assert header.part is RecordPart.ABOUT
    return header, json.loads(data[begin : begin + header.size]), begin + header.size


def with_about(data: bytes, about: dict[str, Any]) -> bytes:
    """The file with another description, whose sizes and checksums are right."""
    header, _, end = about_of(data)
    text = json.dumps(about).encode()
    return header._replace(size=len(text), checksum=checksum([text])).pack() + text + data[end:]


async def test_files_that_say_what_is_not_so_are_refused_and_the_next_request_is_served(tmp_path: Path) -> None:
    async with await demo() as engine:
        await engine.export_prefix(FRANCE, tmp_path / "slot")
    data = (tmp_path / "slot").read_bytes()
    _, about, end = about_of(data)
    tokens = about["tokens"]
    later = data[:4] + struct.pack("<H", 99) + data[6:]
    huge = data[:16] + struct.pack("<Q", 2**39) + data[24:]
    cases = {
        "not a record of format 1": later,
        "cut off|damaged": huge,
        "cut off": data[: end - 4],
        "the head of a record is cut off": data[: end + 40],
        "the payload of a record is cut off": data[:-4],
        "records are missing": with_about(data, {**about, "tokens": tokens + tokens}),
        "and the KV cache holds": with_about(data, {**about, "tokens": tokens * 4000}),
        "describes no full pages": with_about(data, {**about, "tokens": tokens[:-1]}),
        "has tokens that are none": with_about(data, {**about, "tokens": [2**40, *tokens[1:]]}),
        "does not begin with the description": with_about(data, {"tokens": tokens}),
        "is empty": b"",
    }
    async with await demo(kv_cache_memory="16MiB") as engine:
        for said, changed in cases.items():
            (tmp_path / "bad").write_bytes(changed)
            (tmp_path / "bad").chmod(0o600)
            with pytest.raises(InvalidParameter, match=f"file: .*({said})"):
                await engine.import_prefix(tmp_path / "bad")
            answer = await engine.generate("The quick brown fox", PARAMS)
            assert answer.finish_reason == "length"
            engine.core.loop.scheduler.check()
        assert processed(await engine.generate(FRANCE, PARAMS)) > 32
        await engine.import_prefix(tmp_path / "slot")
        assert processed(await engine.generate(GERMANY, PARAMS)) <= 32


async def test_pictures_are_saved_with_the_conversation(tmp_path: Path) -> None:
    save_picture_model("qwen3_vl", tmp_path / "model")
    settings: dict[str, Any] = {"dtype": "float32", "show_progress": False, "num_threads": 1, "check_every": 1}
    mine, other = (chat(words(2, 0) * 4, picture(number), "what is this?") for number in (3, 4))
    async with await AsyncEngine.from_pretrained(tmp_path / "model", **settings) as engine:
        expected = [(await engine.chat(each, PARAMS)).text for each in (mine, other)]
        await engine.export_prefix(mine, tmp_path / "slot")
        await engine.export_prefix([{"role": "user", "content": "The quick brown fox " * 20}], tmp_path / "text")
    async with await AsyncEngine.from_pretrained(tmp_path / "model", **settings) as engine:
        assert await engine.import_prefix(tmp_path / "text") > 0, "a conversation without pictures, too"
        count = await engine.import_prefix(tmp_path / "slot")
        answer = await engine.chat(mine, PARAMS)
        assert (answer.text, answer.usage.cached_tokens) == (expected[0], count)
        answer = await engine.chat(other, PARAMS)
        assert answer.text == expected[1]
        assert answer.usage.cached_tokens < count, "the pages of another picture are not its own"
