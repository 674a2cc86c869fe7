"""Text through the whole engine: equal to decoding the tokens, and ended by stop strings wherever tokens break."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import pytest
from core.text.tokenizer_zoo import KINDS, fast
from support.fake_engine import Reciter, SteppedExecutor, idle, make_engine

from asyncengine import AsyncEngine, ContextLengthExceeded, SamplingParams
from asyncengine.testing.fake_runner import FakeExecutor
from asyncengine.testing.leaks import assert_nothing_held
from asyncengine.text.tokenizer import TextTokenizer

LINE = "The quick brown fox jumps over the lazy dog, and it doesn't stop there! 你好,世界 👍🏽"


@functools.cache
def tokenizer(kind: str) -> TextTokenizer:
    built = KINDS[kind][1]()
    return TextTokenizer(built if hasattr(built, "convert_ids_to_tokens") else fast(built))


def reciting(kind: str, text: str = LINE, **settings: Any) -> tuple[AsyncEngine, list[int]]:
    words = tokenizer(kind)
    script = words.encode(text)
    executor: FakeExecutor = SteppedExecutor(128, 4, Reciter(script, words.vocab_size))
    eos = words.vocab_size - 1
    assert eos not in script
    return make_engine(executor=executor, eos=eos, wiring={"tokenizer": words}, **settings), script


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama2", "gemma", "unigram", "wordpiece"])
async def test_the_text_equals_decoding_all_tokens_at_once(kind: str):
    engine, script = reciting(kind)
    async with engine:
        for length in (1, 2, len(script) // 2, len(script)):
            done = await engine.generate([5], SamplingParams(max_tokens=length))
            assert done.token_ids == script[:length]
            assert done.text == tokenizer(kind).decode(done.token_ids)
            chunks = [c async for c in engine.stream([5], SamplingParams(max_tokens=length))]
            assert "".join(c.text for c in chunks) == done.text


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama2"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stop", ["brown", "ox jum", "r the la", "n't stop there!", "世界"])
async def test_a_stop_string_ends_the_request_across_token_boundaries(kind: str, depth: int, stop: str):
    engine, script = reciting(kind, max_steps_in_flight=depth)
    async with engine:
        whole = tokenizer(kind).decode(script)
        done = await engine.generate([5], SamplingParams(stop=stop, max_tokens=300))
        assert done.finish_reason == "stop"
        assert done.text == whole[: whole.index(stop)]
        kept = await engine.generate([5], SamplingParams(stop=[stop, "never"], include_stop=True, max_tokens=300))
        assert kept.text == whole[: whole.index(stop) + len(stop)]
        assert (done.stop, kept.stop, kept.samples[0].stop) == (stop, stop, stop)
        await idle(engine)
        assert_nothing_held(engine.core)
        stats = engine.stats()
        assert stats.finished == {"stop": 2}
        assert stats.generated_tokens <= len(done.token_ids) + len(kept.token_ids) + 2 * 2


async def test_a_stream_never_shows_the_beginning_of_a_stop_string():
    engine, script = reciting("gpt2")
    async with engine:
        seen = ""
        async for chunk in engine.stream([5], SamplingParams(stop="lazy dog", max_tokens=300)):
            seen += chunk.text
            assert not seen.endswith("l")
            assert chunk.stop == (None if chunk.finish_reason is None else "lazy dog")
        whole = tokenizer("gpt2").decode(script)
        assert seen == whole[: whole.index("lazy dog")]


async def test_what_was_held_back_comes_at_the_end_if_the_stop_string_does_not():
    engine, script = reciting("gpt2")
    async with engine:
        done = await engine.generate([5], SamplingParams(stop="👍🏽!", max_tokens=len(script)))
        assert (done.finish_reason, done.stop) == ("length", None)
        assert done.text == tokenizer("gpt2").decode(script)


async def test_a_stop_string_in_what_was_held_back_is_what_ended_the_text():
    engine, script = reciting("gpt2")
    async with engine:
        texts = [tokenizer("gpt2").decode(script[:length]) for length in range(len(script))]
        length = next(length for length, text in enumerate(texts) if text.endswith("\ufffd"))
        done = await engine.generate([5], SamplingParams(stop="\ufffd", max_tokens=length))
        assert (done.finish_reason, done.stop) == ("stop", "\ufffd")
        assert done.text == texts[length].rstrip("\ufffd")


async def test_stop_strings_are_ignored_before_min_tokens():
    engine, script = reciting("gpt2")
    async with engine:
        whole = tokenizer("gpt2").decode(script)
        done = await engine.generate([5], SamplingParams(stop="o", min_tokens=12, max_tokens=300))
        assert done.finish_reason == "stop"
        assert len(done.token_ids) > 12
        assert done.text.count("o") >= 1
        assert whole.startswith(done.text)


async def test_the_text_of_an_end_token_is_left_out_unless_asked_for():
    engine, script = reciting("gpt2")
    async with engine:
        end = script[6]
        done = await engine.generate([5], SamplingParams(stop_token_ids=[end], max_tokens=300))
        at = script.index(end)
        assert done.token_ids == script[: at + 1]
        assert done.text == tokenizer("gpt2").decode(script[:at])
        kept = await engine.generate([5], SamplingParams(stop_token_ids=[end], include_stop=True, max_tokens=300))
        assert kept.text == tokenizer("gpt2").decode(script[: at + 1])


async def test_an_aborted_stream_keeps_whole_characters():
    engine, script = reciting("gpt2", text="👍🏽👩‍👩‍👧‍👦" * 8)
    async with engine:
        for after in range(1, 8):
            stream = engine.stream([5], SamplingParams(max_tokens=len(script)))
            for _ in range(after):
                await anext(stream)
            stream.abort()
            done = await stream.result()
            assert done.text == tokenizer("gpt2").decode(done.token_ids)


async def test_text_prompts_are_tokenized_also_when_they_are_long():
    engine, _ = reciting("gpt2")
    async with engine:
        done = await engine.generate("The quick", SamplingParams(max_tokens=3))
        assert done.usage.prompt_tokens == len(tokenizer("gpt2").encode("The quick"))
        with pytest.raises(ValueError, match="the context of 508"):
            await engine.generate("The quick brown fox " * 500, SamplingParams(max_tokens=3))
        assert engine.count_tokens("The quick") == done.usage.prompt_tokens


LONG = "The quick brown fox " * 300


@pytest.mark.parametrize(
    ("asked", "inline"),
    [
        ({"prompt": "The quick"}, True),
        ({"prompt": "The quick", "prediction": "brown fox"}, True),
        ({"prompt": LONG}, False),
        ({"prompt": "The quick", "prediction": LONG}, False),
        (
            {"prompt": "The quick", "prediction": {"type": "content", "content": [{"type": "text", "text": LONG}]}},
            False,
        ),
    ],
)
async def test_long_texts_are_not_tokenized_on_the_callers_loop(
    asked: dict[str, Any], inline: bool, monkeypatch: pytest.MonkeyPatch
):
    engine, _ = reciting("gpt2")
    loops, seen = threading.current_thread(), set()
    encode = TextTokenizer.encode

    def watched(*given: Any, **named: Any) -> list[int]:
        seen.add(threading.current_thread() is loops)
        return encode(*given, **named)

    monkeypatch.setattr(TextTokenizer, "encode", watched)
    async with engine:
        with contextlib.suppress(ContextLengthExceeded):
            await engine.generate(asked.pop("prompt"), SamplingParams(max_tokens=3), **asked)
    assert seen == {inline}
