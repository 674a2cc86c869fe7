"""Prefixes in files: who reads one answers as if it had computed it, and what does not fit is refused by name."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from promises.test_restored import FAMILIES, OTHER, PARAMS, PROMPT, SETTINGS, made_once, scores
from support.fake_engine import until
from support.long import LONG
from support.picture_models import chat, picture, save_picture_model, words
from support.tiny_models import VOCAB, make_checkpoint

import asyncengine
from asyncengine import AsyncEngine, Engine, EngineClosed, InvalidParameter, SamplingParams
from asyncengine.engine import prefix_files, prefix_store
from asyncengine.kvcache.store.record import Header, checksum

MEMORIES = FAMILIES if LONG else ("qwen3", "gemma3", "qwen3.5", "gguf")
"""Each kind of memory: pages, of windows, states, of a file's types. What lies in them
is copied as it is for a disk, for all families in `test_restored`."""
LONGER = [*PROMPT, *OTHER[50:]]


checkpoint = pytest.fixture(made_once, scope="module")


async def load(path: Path, **settings: Any) -> AsyncEngine:
    return await AsyncEngine.from_pretrained(path, **{**SETTINGS, "check_every": 1, **settings})


@pytest.mark.parametrize("family", MEMORIES)
async def test_an_imported_prefix_equals_a_computed_one_to_the_bit(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path, settings, file = checkpoint(family), FAMILIES[family], tmp_path / "session.prefix"
    async with await load(path, **settings) as engine:
        expected = [scores(await engine.generate(prompt, PARAMS)) for prompt in (LONGER, OTHER)]
    async with await load(path, **settings) as engine:
        tokens = await engine.export_prefix(PROMPT, file)
        assert 64 <= tokens <= len(PROMPT)
        await until(lambda: engine.stats().pages.shared == 0, "the export's pin to go")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [file.name]
    async with await load(path, **settings) as engine:
        assert await engine.import_prefix(file) == tokens
        assert await engine.import_prefix(file) == tokens, "what is there is not read again"
        engine.core.loop.scheduler.check()
        answers = [await engine.generate(prompt, PARAMS) for prompt in (LONGER, OTHER)]
        assert [scores(answer) for answer in answers] == expected
        assert answers[0].usage.cached_tokens == tokens
        assert answers[0].usage.restored_tokens == 0


async def test_what_differs_is_named(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama, file = checkpoint("llama"), tmp_path / "file"
    async with await load(llama) as engine:
        await engine.export_prefix(PROMPT, file)
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    kinds: list[tuple[Path, dict[str, Any], str]] = [
        (other, {}, r"another model weights \(\w{12}\.\.\., here \w{12}\.\.\.\), got"),
        (llama, {"dtype": "bfloat16"}, r"another dtype \(float32, here bfloat16\)"),
        (llama, {"page_size": 8}, r"another page size \(16, here 8\)"),
        (llama, {"quantization": "int8"}, "another quantization"),
        (llama, {"max_lora_rank": 8}, "another LoRA settings"),
    ]
    for path, settings, said in kinds:
        async with await load(path, **settings) as engine:
            with pytest.raises(InvalidParameter, match=f"file: cannot be used: was computed with.* {said}"):
                await engine.import_prefix(file)
            assert (await engine.generate(PROMPT, PARAMS)).usage.cached_tokens == 0
            engine.core.loop.scheduler.check()
    async with await load(llama) as engine:
        with pytest.raises(InvalidParameter, match="cannot be used: was computed with another cache_salt"):
            await engine.import_prefix(file, cache_salt="tenant")
        with pytest.raises(InvalidParameter, match="adapter"):
            await engine.import_prefix(file, adapter="nobody")
    monkeypatch.setattr(asyncengine, "__version__", "9.9")
    async with await load(llama) as engine:
        with pytest.raises(InvalidParameter, match=r"another version \(.*, here 9\.9\)"):
            await engine.import_prefix(file)


async def test_adapters_and_salts_keep_their_own(tmp_path: Path) -> None:
    from support.peft_checkpoints import make_peft, tiny_llama

    def model() -> Any:
        return tiny_llama(vocab_size=VOCAB, max_position_embeddings=400)

    model().save_pretrained(tmp_path / "model")
    adapters = {name: str(tmp_path / name) for name in ("one", "two")}
    for seed, folder in enumerate(adapters.values()):
        make_peft(model(), seed).save_pretrained(folder)
    file, options = tmp_path / "file", {"adapter": "one", "cache_salt": "tenant"}
    async with await load(tmp_path / "model", adapters=adapters) as engine:
        expected = scores(await engine.generate(LONGER, PARAMS, adapter="one"))
        await engine.export_prefix(PROMPT, file, **options)
    async with await load(tmp_path / "model", adapters=adapters) as engine:
        with pytest.raises(InvalidParameter, match=r"another adapter \(\w{12}\.\.\., here none\)"):
            await engine.import_prefix(file)
        with pytest.raises(InvalidParameter, match=r"another adapter \(\w{12}\.\.\., here \w{12}\.\.\.\)"):
            await engine.import_prefix(file, adapter="two")
        await engine.import_prefix(file, **options)
        answer = await engine.generate(LONGER, PARAMS, **options)
        assert answer.usage.cached_tokens >= 64
        assert scores(answer) == expected
        for others in ({}, {"adapter": "one"}, {"adapter": "two", "cache_salt": "tenant"}):
            assert (await engine.generate(LONGER, PARAMS, **others)).usage.cached_tokens == 0


def forged(data: bytes) -> dict[str, bytes]:
    """Files whose description says what is not so, with right sizes and checksums, by what is said of them."""
    header, begin = Header.unpack(data)
    about = json.loads(data[begin : begin + header.size])
    tokens = about["tokens"]

    def described(changed: dict[str, Any]) -> bytes:
        text = json.dumps(changed).encode()
        return header._replace(size=len(text), checksum=checksum([text])).pack() + text + data[begin + header.size :]

    return {
        "records are missing": described({**about, "tokens": tokens + tokens}),
        "and the KV cache holds": described({**about, "tokens": tokens * 4000}),
        "describes no full pages": described({**about, "tokens": tokens[:-1]}),
        "has tokens that are none": described({**about, "tokens": [2**40, *tokens[1:]]}),
        "does not begin with the description": described({"tokens": tokens}),
    }


async def test_files_that_are_none_are_refused_and_nothing_is_cached(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    file, bad, rng = tmp_path / "file", tmp_path / "bad", random.Random(5)
    async with await load(checkpoint("qwen3.5")) as engine:
        await engine.export_prefix(PROMPT, file)
    whole = file.read_bytes()
    async with await load(checkpoint("qwen3.5")) as engine:

        async def refused(said: str, path: Any = bad) -> None:
            with pytest.raises(InvalidParameter, match=f"file: .*{said}"):
                await engine.import_prefix(path)
            engine.core.loop.scheduler.check()
            assert engine.stats().pages.free == engine.stats().pages.total

        for length in (0, 1, 100, *(rng.randrange(len(whole)) for _ in range(20)), len(whole) - 1):
            bad.write_bytes(whole[:length])
            bad.chmod(0o600)
            await refused("cannot be used")
        for place in (0, 30, *(rng.randrange(len(whole)) for _ in range(20)), len(whole) - 1):
            bad.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
            await refused("cannot be used")
        bad.write_bytes(whole + whole)
        await refused("does not belong")
        for said, changed in forged(whole).items():
            bad.write_bytes(changed)
            await refused(said)
        (tmp_path / "link").symlink_to(file)
        await refused("cannot be read", tmp_path / "link")
        await refused("cannot be read", tmp_path)
        await refused("cannot be read", tmp_path / "nothing")
        await refused("must be the path of a file", 3)
        await refused("must be the path of a file", "a\0b")
        file.chmod(0o666)
        await refused("only this user can write", file)
        file.chmod(0o400)
        assert await engine.import_prefix(file) >= 64


async def test_what_cannot_be_written_is_refused_and_what_was_there_stays(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("as it was")
    async with await load(checkpoint("llama")) as engine:
        for path in (tmp_path, tmp_path / "no" / "file", file / "below", b"bytes", "a\0b"):
            with pytest.raises(InvalidParameter, match="file: must be the path of a file"):
                await engine.export_prefix(PROMPT, path)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameter, match="prefix: is too short: pages have 16 tokens, and it has 15"):
            await engine.export_prefix(PROMPT[:15], file)

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(prefix_files.os, "fsync", full)
            with pytest.raises(OSError, match="no space left"):
                await engine.export_prefix(PROMPT, file)
        assert file.read_text() == "as it was"
        assert os.listdir(tmp_path) == ["file"]
        await until(lambda: engine.stats().pages.shared == 0, "the export's pin to go")
        await engine.update_weights(checkpoint("llama"))
        for call in (engine.export_prefix(PROMPT, file), engine.import_prefix(file)):
            with pytest.raises(InvalidParameter, match="does not work after update_weights"):
                await call
    with pytest.raises(EngineClosed):
        await engine.import_prefix(file)
    async with await load(checkpoint("llama"), prefix_caching=False) as engine:
        for call in (engine.export_prefix(PROMPT, file), engine.import_prefix(file)):
            with pytest.raises(InvalidParameter, match="needs prefix_caching"):
                await call


async def test_weights_that_changed_on_the_disk_have_no_name(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path / "model")
    async with await load(path) as engine:
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes())
        with pytest.raises(InvalidParameter, match="model: has other files than when it was loaded"):
            await engine.export_prefix(PROMPT, tmp_path / "file")


async def test_an_imported_prefix_is_kept_on_the_disk_as_a_computed_one(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", 100.0)
    path, kept = checkpoint("qwen3.5"), {"kv_cache_dir": tmp_path / "kv"}
    async with await load(path) as engine:
        tokens = await engine.export_prefix(PROMPT, tmp_path / "file")
    async with await load(path, **kept) as engine:
        await engine.import_prefix(tmp_path / "file")
    async with await load(path, **kept) as engine:
        assert (await engine.generate(LONGER, PARAMS)).usage.restored_tokens == tokens


def test_the_blocking_face_does_the_same(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    settings, file = {**SETTINGS, "check_every": 1}, tmp_path / "file"
    with Engine.from_pretrained(checkpoint("qwen3"), **settings) as engine:
        with engine.pin(PROMPT) as tokens:
            assert tokens == len(PROMPT)
            assert engine.stats().pages.shared == len(PROMPT) // 16
        engine.generate([5], PARAMS)
        assert engine.stats().pages.shared == 0
        written = engine.export_prefix(PROMPT, file)
    with Engine.from_pretrained(checkpoint("qwen3"), **settings) as engine:
        assert engine.import_prefix(file) == written == 80
        streams = engine.fork(PROMPT, 3, SamplingParams(max_tokens=3, seed=7, ignore_eos=True))
        answers = [stream.result() for stream in streams]
        assert all(answer.usage.cached_tokens == written for answer in answers)
        samples = engine.generate(PROMPT, SamplingParams(max_tokens=3, seed=7, n=3, ignore_eos=True)).samples
        assert [answer.token_ids for answer in answers] == [sample.token_ids for sample in samples]


async def test_a_chat_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "You answer in one word. " * 12}, {"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        written = await engine.export_prefix(chat, tmp_path / "file", tools=tools)
        with pytest.raises(InvalidParameter, match="tools"):
            await engine.export_prefix("a text", tmp_path / "file", tools=tools)
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        await engine.import_prefix(tmp_path / "file")
        forks = engine.fork(chat, 2, SamplingParams(max_tokens=4), tools=tools)
        assert [(await fork.result()).usage.cached_tokens for fork in forks] == [written, written]
        with pytest.raises(InvalidParameter, match="n: must"):
            engine.fork(chat, 0)
        with pytest.raises(InvalidParameter, match="n: 1000000000 exceeds the engine's max_n=128"):
            engine.fork(chat, 10**9)
        with pytest.raises(InvalidParameter, match="file: must be the path of a file"):
            await engine.export_prefix(chat, None)  # type: ignore[arg-type]


async def test_pictures_are_saved_with_the_conversation(tmp_path: Path) -> None:
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    save_picture_model("qwen3_vl", tmp_path / "model")
    settings: dict[str, Any] = {"dtype": "float32", "show_progress": False, "num_threads": 1, "check_every": 1}
    mine, other = (chat(words(2, 0) * 4, picture(number), "what is this?") for number in (3, 4))
    async with await AsyncEngine.from_pretrained(tmp_path / "model", **settings) as engine:
        expected = [(await engine.chat(each, greedy)).text for each in (mine, other)]
        await engine.export_prefix(mine, tmp_path / "slot")
        await engine.export_prefix([{"role": "user", "content": "The quick brown fox " * 20}], tmp_path / "text")
    async with await AsyncEngine.from_pretrained(tmp_path / "model", **settings) as engine:
        assert await engine.import_prefix(tmp_path / "text") > 0, "a conversation without pictures, too"
        count = await engine.import_prefix(tmp_path / "slot")
        answer = await engine.chat(mine, greedy)
        assert (answer.text, answer.usage.cached_tokens) == (expected[0], count)
        answer = await engine.chat(other, greedy)
        assert answer.text == expected[1]
        assert answer.usage.cached_tokens < count, "the pages of another picture are not its own"
