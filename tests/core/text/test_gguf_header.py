"""Broken and hostile tokenizer metadata: a named error, at once, whatever is wrong."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest
from core.text.gguf_zoo import SENTENCEPIECE, published
from support.data import cases_of
from support.gguf_metadata import byte_level_metadata, sentencepiece_metadata
from support.long import TIMES

from asyncengine.assembly.gguf_text import load_gguf_tokenizer
from asyncengine.assembly.gguf_text.header import MAX_TOKEN_CHARS
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel

ROWS: dict[str, Any] = cases_of(__file__)

MUTATIONS = 300 * TIMES
"""Mutated headers; 20,000 make the long form (a few minutes)."""
P = "tokenizer.ggml."


def byte_level() -> dict[str, Any]:
    return byte_level_metadata(published("llama-bpe"), "llama-bpe")


def sentencepiece() -> dict[str, Any]:
    return sentencepiece_metadata(*SENTENCEPIECE["llama"]())


def refused(metadata: dict[str, Any], kind: type[EngineError] = ModelNotFound) -> str:
    """The message of the error, which came within a second of computing and is short."""
    before = time.thread_time()
    with pytest.raises(kind) as caught:
        load_gguf_tokenizer(metadata)
    assert time.thread_time() - before < 1
    assert len(str(caught.value)) <= 1100
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *ROWS["one_broken_key"],
        ("model", "x" * 100_000, "model has 100000 characters"),
        ("tokens", ["a"] * 10_000_000, "tokens has 10000000 entries, the limit is 1000000"),
        ("tokens", ["a", "b" * 3_000_000], f"holds a token of 3000000 characters, the limit is {MAX_TOKEN_CHARS}"),
        ("tokens", ["ab" * 1000] * 5_000, "tokens has 10000000 characters"),
        ("token_type", ["normal"] * 4, "token_type holds something else than whole numbers"),
        ("scores", [float("nan")], "scores holds a number that is not finite"),
        ("bos_token_id", 10**9, "bos_token_id is 1000000000, outside the vocabulary of"),
    ],
)
def test_one_broken_key(key: str, value: Any, message: str) -> None:
    metadata = byte_level()
    if value is None:
        del metadata[P + key]
    else:
        metadata[P + key] = value
    assert re.search(message, refused(metadata))


def test_scores_that_are_missing_or_short() -> None:
    metadata = sentencepiece()
    metadata[P + "scores"] = metadata[P + "scores"][:-1]
    assert "scores has" in refused(metadata)
    del metadata[P + "scores"]
    assert "scores is missing, and there are no merges" in refused(metadata)


def test_vocabularies_that_would_take_minutes() -> None:
    runs = [letter * count for count in range(1, 1900) for letter in "abcd"]
    long = {P + "model": "llama", P + "tokens": runs, P + "scores": [0.0] * len(runs)}
    assert "tokens are too long to find their merges" in refused(long)
    marks = [f"<{index}>" for index in range(200_000)]
    many = {P + "model": "llama", P + "tokens": marks, P + "scores": [0.0] * 200_000, P + "token_type": [3] * 200_000}
    assert "marks 200000 tokens as control or user-defined, the limit is 100000" in refused(many)


def test_a_flag_that_asks_for_a_token_that_is_not_named() -> None:
    metadata = byte_level() | {P + "add_bos_token": True}
    del metadata[P + "bos_token_id"]
    assert "add_bos_token is set, but there is no tokenizer.ggml.bos_token_id" in refused(metadata)


@pytest.mark.parametrize("kind", ["rwkv", "plamo2", "t5", "no_vocab", "", "x" * 500])
def test_unknown_kinds_are_refused_by_name(kind: str) -> None:
    message = refused(byte_level() | {P + "model": kind}, UnsupportedModel)
    assert kind[:40] in message
    assert "known are gpt2, llama, gemma4, bert" in message


def test_unknown_ways_of_cutting_are_refused_by_name() -> None:
    message = refused(byte_level() | {P + "pre": "afmoe"}, UnsupportedModel)
    assert "'afmoe'" in message
    assert "qwen2" in message
    metadata = byte_level()
    del metadata[P + "pre"]
    assert "no tokenizer.ggml.pre" in refused(metadata, UnsupportedModel)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.chat_template", 5, "chat_template is a int"),
        ("tokenizer.chat_template", "x" * 2_000_000, "chat_template has 2000000 characters"),
        ("tokenizer.chat_template.tools", b"x", "chat_template.tools is a bytes"),
        ("tokenizer.huggingface.json", "[" * 100_000, "cannot be built"),
        ("tokenizer.huggingface.json", "x" * 65_000_000, "has 65000000 characters"),
    ],
)
def test_templates_and_whole_tokenizers(key: str, value: Any, message: str) -> None:
    assert message in refused(byte_level() | {key: value})


def test_a_whole_tokenizer_of_another_model() -> None:
    metadata = byte_level() | {"tokenizer.huggingface.json": published("qwen2").backend_tokenizer.to_str()}
    metadata[P + "tokens"] = metadata[P + "tokens"][:100]
    metadata[P + "token_type"] = metadata[P + "token_type"][:100]
    for name in ("bos_token_id", "eos_token_id"):
        del metadata[P + name]
    assert "has more tokens than tokenizer.ggml.tokens" in refused(metadata)


def test_too_many_templates() -> None:
    more = {f"tokenizer.chat_template.{index}": "x" for index in range(100_000)}
    assert "comes in more than 64 forms" in refused(byte_level() | more)


def test_tokens_may_be_nameless_and_an_id_may_be_none() -> None:
    metadata = byte_level()
    plain = load_gguf_tokenizer(metadata)
    metadata[P + "eot_token_id"] = 0xFFFF_FFFF  # how some writers say none
    count = len(metadata[P + "tokens"])
    metadata[P + "tokens"] += ["", ""]
    metadata[P + "token_type"] += [1, 1]
    built = load_gguf_tokenizer(metadata)
    assert built.encode("quick fox") == plain.encode("quick fox")
    assert built.hf.convert_ids_to_tokens([count, count + 1]) == [f"[EMPTY_{count}]", f"[EMPTY_{count + 1}]"]


def mutated(metadata: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The header with one to three things wrong with it: a value of another kind, or an array changed inside."""
    odd = (None, -1, 0, 3, 2**40, 1.5, "", "x", "\ud800", b"x", [], [1], ["a"], {}, True, float("nan"), object())
    metadata = dict(metadata)
    for _ in range(rng.randrange(1, 4)):
        key = rng.choice(sorted(metadata))
        value = metadata[key]
        if isinstance(value, list) and value and rng.random() < 0.8:
            value = list(value)
            at = rng.randrange(len(value))
            match rng.randrange(4):
                case 0:
                    value[at] = rng.choice([*odd, *value[:9], "a b", " ", "\0", "é" * 3000])
                case 1:
                    del value[at:]
                case 2:
                    value.insert(at, rng.choice(value))
                case _:
                    value[at], value[0] = value[0], value[at]
        else:
            value = rng.choice([*odd, rng.randrange(600), "gpt2", "llama", "gemma4", "qwen2"])
        metadata[key] = value
    return metadata


@pytest.mark.parametrize("source", [byte_level, sentencepiece])
def test_mutated_headers_build_a_tokenizer_or_are_refused(source: Any) -> None:
    metadata = source()
    rng = random.Random(7)
    built = 0
    for _ in range(MUTATIONS):
        try:
            tokenizer = load_gguf_tokenizer(mutated(metadata, rng))
        except EngineError:
            continue
        built += 1
        assert isinstance(tokenizer.decode(tokenizer.encode("The quick fox")), str)
    assert 0 < built < MUTATIONS
