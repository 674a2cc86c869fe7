"""A budget of thoughts on a real model: up to the end that is forced nothing changes, and the answer follows."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncengine import AsyncEngine, ChatKeywords, Engine, SamplingParams
from asyncengine.config import EngineConfig
from asyncengine.grammar import Grammar
from asyncengine.grammar.narrowing import BadWords
from asyncengine.grammar.thinking import ThinkingBudget
from asyncengine.request_spec import RequestSpec
from asyncengine.testing import Recording

FRAME = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{# ends with </think> #}{% endif %}"""
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if tools %}{# <|channel|>analysis<|message|> and functions. #}{% endif -%}
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "function": {"name": "add", "parameters": NUMBER}}
FORMAT = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
CHANNELS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>")
FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "qwen": (FRAME, ("<think>", "</think>"), "</think>"),
    "seed, as text": (FRAME.replace("think>", "seed:think>"), (), "</seed:think>"),
    "harmony": (HARMONY, CHANNELS, "<|end|>"),
}
"""Template, special tokens, and the mark that ends thoughts."""
QUESTIONS = ["one", "another one, which is rather longer than a page of sixteen tokens", "x" * 40]


def written(folder: Path, template: str, special: tuple[str, ...]) -> Path:
    """A tiny random model whose tokens are bytes and marks."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["</s>", "<|im_start|>", "<|im_end|>", *special])
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    hf.chat_template = template
    hf.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(hf), hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=256, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(5)
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(40)
        plain = [
            token
            for token, text in enumerate(hf.convert_ids_to_tokens(range(256)))
            if text.isalnum() and text.isascii()
        ]
        kept = model.lm_head.weight[plain].clone()
        model.lm_head.weight.zero_()  # other bytes and marks come where something asks for them
        model.lm_head.weight[plain] = kept
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = ((family, written(tmp_path_factory.mktemp("m"), *FAMILIES[family][:2])) for family in FAMILIES)
    return dict(made)


def engine(folder: Path, **settings: Any) -> Any:
    return AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="4MB", num_threads=1, **settings)


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def params(seed: int, **changes: Any) -> SamplingParams:
    temperature = 0.0 if seed % 2 else 1.0
    return SamplingParams(
        **{"on_budget": "offer", "max_tokens": 110, "temperature": temperature, "seed": seed, "top_k": 20, **changes}
    )


KINDS: dict[str, ChatKeywords] = {
    "free": {}, "calls": {"tools": [ADD], "tool_choice": "required"}, "answer": {"response_format": FORMAT},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "one step at a time": {"max_steps_in_flight": 1},
    "no jumps, preempted": {"jump_forward": False, "preempt_every": 4},
    "two steps in flight, preempted": {"max_steps_in_flight": 2, "preempt_every": 5, "max_num_batched_tokens": 24},
    "guesses": {"speculation": "lookup"},
}


@pytest.mark.parametrize("family", ["qwen", "seed, as text"])
async def test_the_forced_end_changes_nothing_before_it(family: str, folders: dict[str, Path]) -> None:
    end = FAMILIES[family][2]
    found: dict[str, list[Any]] = {}
    for name, settings in SETTINGS.items():
        async with await engine(folders[family], **settings) as made:
            asked = [(question, kind, most) for question in QUESTIONS for kind in KINDS for most in (0, 1, 9)]
            found[name] = await asyncio.gather(
                *(
                    made.chat(chat(question), params(seed), max_thinking_tokens=most, **KINDS[kind])
                    for seed, (question, kind, most) in enumerate(asked)
                )
            )
            if name != "one step at a time":
                continue
            mark = made.tokenize(end, add_special_tokens=False)
            for seed, ((question, kind, most), answer) in enumerate(zip(asked, found[name], strict=True)):
                alone = await made.chat(chat(question), params(seed), **KINDS[kind])
                assert answer.token_ids[:most] == alone.token_ids[:most]
                assert answer.token_ids[most : most + len(mark)] == mark
                assert alone.token_ids[most : most + len(mark)] != mark
                assert answer.usage.reasoning_tokens - most in (0, len(mark) - 1)
                if kind == "calls":
                    assert answer.tool_calls
                if kind == "answer":
                    assert json.loads(answer.text)["n"] in (1, 22, 333)
    for name, answers in found.items():
        first = [
            (each.token_ids, each.text, each.reasoning, each.finish_reason) for each in found["one step at a time"]
        ]
        assert [(each.token_ids, each.text, each.reasoning, each.finish_reason) for each in answers] == first, name


async def test_channels_are_held_with_calls_and_without(folders: dict[str, Path]) -> None:
    async with await engine(folders["harmony"]) as made:
        channel, a = made.tokenize("<|channel|>a", add_special_tokens=False)
        liked = params(1, logit_bias={channel: 95.0, a: 90.0}, max_tokens=150)
        for most in (0, 6):
            answer = await made.chat(chat("one"), liked, max_thinking_tokens=most, **KINDS["calls"])
            assert answer.reasoning == "a" * most
            assert [call.name for call in answer.tool_calls] == ["add"]
        endless = await made.chat(chat("one"), liked.replace(on_budget="truncate"), **KINDS["calls"])
        assert set(endless.reasoning) == {"a"}
        assert not endless.tool_calls


async def test_samples_streams_and_log_probabilities(folders: dict[str, Path]) -> None:
    async with await engine(folders["qwen"]) as made:
        scored = params(2, n=3, logprobs=True)
        several = await made.chat(chat("one"), params(2, n=3), max_thinking_tokens=5)
        for index, sample in enumerate(several.samples):
            assert len(sample.token_ids) >= 6
            pieces = [
                chunk async for chunk in made.stream_chat(chat("one"), scored, max_thinking_tokens=5)
                if chunk.index == index
            ]  # fmt: skip
            assert [token for piece in pieces for token in piece.token_ids] == sample.token_ids
            assert "".join(piece.reasoning for piece in pieces) == sample.reasoning
            scores = [entry for piece in pieces for entry in piece.logprobs or ()]
            assert [entry.token_id for entry in scores][:6] == sample.token_ids[:6]
        assert several.usage.reasoning_tokens == 15


async def test_words_are_held_off_in_thoughts_and_answers(folders: dict[str, Path]) -> None:
    async with await engine(folders["qwen"]) as made:
        for kind in ("free", "calls"):
            free = await made.chat(chat("one"), params(1), max_thinking_tokens=30, **KINDS[kind])
            bad = [free.reasoning[5:7], free.reasoning[9], free.reasoning[20:23]]
            answer = await made.chat(chat("one"), params(1, bad_words=bad), max_thinking_tokens=30, **KINDS[kind])
            assert len(answer.reasoning) == 30
            assert answer.reasoning[:5] == free.reasoning[:5]
            assert not any(word in answer.reasoning + answer.text for word in bad)
            assert bool(answer.tool_calls) is (kind == "calls")


def test_an_engine_of_its_own_thread_refuses_by_name(folders: dict[str, Path]) -> None:
    with Engine.from_pretrained(folders["qwen"], dtype="float32", kv_cache_memory="4MB") as made:
        answer = made.chat(chat("one"), params(3), max_thinking_tokens=2)
        assert answer.usage.reasoning_tokens == 2
        for wrong in (-1, 1.5, "2"):
            with pytest.raises(ValueError, match="max_thinking_tokens: must be an integer"):
                made.chat(chat("one"), max_thinking_tokens=wrong)  # type: ignore[arg-type]


def test_it_travels_as_plain_data(tmp_path: Path) -> None:
    """To the engines of a fleet, and into a recording."""
    for grammar in (None, Grammar.json_object(), BadWords(words=((1, 2),), grammar=Grammar.json_object())):
        budget = ThinkingBudget(3, "<think>", "</think>", "</think>", True, grammar=grammar)
        assert pickle.loads(pickle.dumps(budget)) == budget
        recording = Recording(EngineConfig(), 8)
        recording.record("apply", RequestSpec(1, (1, 2), SamplingParams(grammar=budget), 9))
        [(_, spec)] = Recording.load(recording.save(tmp_path / "saved")).entries
        assert isinstance(spec, RequestSpec)
        assert type(spec.params.grammar.grammar) is type(grammar)
        assert json.dumps(asdict(spec.params.grammar)) == json.dumps(asdict(budget))
