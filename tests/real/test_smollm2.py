"""SmolLM2-135M-Instruct, a GGUF file whose blocks have 32 weights, against transformers in float32 on the weights that
the file holds."""

from __future__ import annotations

import asyncio
import inspect
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.real_models import paragraphs

from asyncengine import AsyncEngine, Engine, SamplingParams
from benchmarks.divergence import Divergence, compare, here, reference, write_float32

LENGTH = 1024
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=True)
GREEDY = SamplingParams(temperature=0, max_tokens=32)
LLAMA_CPP = 0.00416
"""Mean KL divergence of llama.cpp on this file, at the positions of `benchmarks.divergence`, as `--llama-cpp` there
measures it: the package xllamacpp 2026.10.11549 on AVX2, one request for each position."""


@pytest.fixture(scope="module")
def plain(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of safetensors with the file's weights in float32."""
    write_float32(smollm2, folder := tmp_path_factory.mktemp("float32"))
    return folder


@pytest.fixture(scope="module")
def library(plain: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)


@pytest.fixture(scope="module")
def texts(plain: Path) -> list[list[int]]:
    """Token ids of English and of code that the interpreter brings along."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain)
    written = "\n\n".join(paragraphs()[:200]), inspect.getsource(textwrap)
    return [tokenizer.encode(text, add_special_tokens=False)[:LENGTH] for text in written]


@pytest.fixture(scope="module")
def right(library: Any, texts: list[list[int]]) -> list[float]:
    """The perplexity of each text by the reference."""
    found = []
    for ids in texts:
        with torch.inference_mode():
            logits = library(torch.tensor([ids])).logits[0, :-1]
        found.append(math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()))
    return found


def load(model: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(str(model), show_progress=False, kv_cache_memory="200MiB", **settings)


def losses(engine: Engine, ids: Sequence[int]) -> list[float]:
    scores = engine.generate(list(ids), SCORE).prompt_logprobs
    assert scores is not None
    return [-each.logprob for each in scores[1:] if each is not None]


def perplexities(model: Path, texts: list[list[int]], **settings: Any) -> list[float]:
    with load(model, **settings) as engine:
        return [math.exp(sum(found := losses(engine, ids)) / len(found)) for ids in texts]


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"dtype": "float32"}, 1.002),
        ({"dtype": "float32", "kv_cache_dtype": "int8"}, 1.003),
        ({"quantization": "int8"}, 1.02),
        ({"quantization": "int4"}, 1.10),
    ],
    ids=str,
)  # fmt: skip
def test_perplexity(
    settings: dict[str, Any], most: float, plain: Path, texts: list[list[int]], right: list[float]
) -> None:
    """It is that of the reference in float32, and what weights in 8 and 4 bits lose is bounded, for each text."""
    found = perplexities(plain, texts, **settings)
    ratios = [one / other for one, other in zip(found, right, strict=True)]
    assert max(ratios) <= most, (found, right)
    assert min(ratios) >= 2 - most, (found, right)


@pytest.fixture(scope="module")
def scored(plain: Path) -> tuple[list[list[int]], list[torch.Tensor]]:
    return reference(plain)


def test_the_file_is_read_as_exactly_as_llama_cpp_reads_it(
    smollm2: Path, scored: tuple[list[list[int]], list[torch.Tensor]]
) -> None:
    """The file is loaded without any setting."""
    ids, logits = scored
    found: Divergence = compare(ids, logits, here(str(smollm2), ids))
    assert found.divergence <= LLAMA_CPP, found


def test_float32_means_the_numbers_of_the_file(
    smollm2: Path, scored: tuple[list[list[int]], list[torch.Tensor]]
) -> None:
    """Log-probabilities through the whole engine, prompts of which it computes together with others."""
    ids, logits = scored
    with load(smollm2, dtype="float32") as engine:
        found = [losses(engine, each) for each in ids]
    for each, one, wanted in zip(ids, found, logits, strict=True):
        expected = -wanted[:-1].log_softmax(-1).gather(1, torch.tensor(each[1:])[:, None])[:, 0]
        assert (torch.tensor(one) - expected).abs().max() < 1e-4


async def test_decisions_are_those_of_the_pipeline_and_repeat(plain: Path) -> None:
    """To 1e-4, of long states and short ones; and to the bit, whatever else is asked at the time and was before."""
    from transformers import pipeline

    questions: dict[str, Any] = {
        "code": {"type": "noul", "instructions": "Is this text about program code?"},
        "topic": {
            "type": "choice", "instructions": "What is this text about?",
            "criteria": {"classes": "classes and methods", "numbers": None, "errors": "exceptions", "else": None},
        },
        "hard": {"type": "score", "instructions": "How hard is it to read?", "criteria": ["Easy", "Hard", "Very hard"]},
    }  # fmt: skip
    states = ["\n\n".join(paragraphs()[start : start + size]) for start, size in ((0, 1), (20, 2), (40, 9), (90, 14))]
    async with await AsyncEngine.from_pretrained(plain, dtype="float32", kv_cache_memory="200MiB") as engine:
        alone = [await engine.decide(state, questions) for state in states]
        chats = [asyncio.ensure_future(engine.chat([{"role": "user", "content": state}], GREEDY)) for state in states]
        turned = dict(reversed(questions.items()))
        beside = await asyncio.gather(*(engine.decide(state, turned) for state in states))
        await asyncio.gather(*chats)
    assert [each.answers for each in beside] == [each.answers for each in alone]
    oracle = pipeline("decision", model=str(plain), dtype="float32")
    worst = 0.0
    for state, decision in zip(states, alone, strict=True):
        for name, wanted in oracle({"state": state, "questions": questions}).items():
            answer, options = decision[name], wanted.get("probabilities", {})
            pairs = [(answer.details[key], value) for key, value in wanted.items() if isinstance(value, float)]
            pairs += [(answer.probabilities[option], value) for option, value in options.items()]
            worst = max(worst, *(abs(one - other) for one, other in pairs))
    assert worst < 1e-4


SUBJECTS = (
    "rain",
    "the moon",
    "bread",
    "chess",
    "a violin",
    "winter",
    "honey",
    "Norway",
    "a bridge",
    "the number seven",
)
QUESTIONS = (
    "What is {}?", "Write one sentence about {}.", "Why do people like {}?", "Tell a child what to know about {}.",
    "List three words that go with {}.",
)  # fmt: skip


def test_greedy_answers_are_those_of_the_reference_in_any_company(plain: Path, library: Any) -> None:
    """Fifty chats: each token is the likeliest of the reference's, whether they run together, again, mostly from the
    prefix cache, or alone. A near tie may go either way: sums of float32 are made in another order."""
    chats = [[{"role": "user", "content": ask.format(about)}] for about in SUBJECTS for ask in QUESTIONS]
    with load(plain, dtype="float32") as engine:
        prompts = [engine.tokenize(chat) for chat in chats]
        together = engine.generate_many(prompts, GREEDY)
        again = engine.generate_many(prompts, GREEDY)
        alone = [engine.generate(prompt, GREEDY, cache_salt=str(at)) for at, prompt in enumerate(prompts[::5])]
    answers = [each.token_ids for each in together]
    assert [each.token_ids for each in again] == answers
    assert [each.token_ids for each in alone] == answers[::5]
    assert sum(each.usage.cached_tokens for each in again) > 0
    assert not any(each.usage.cached_tokens for each in alone)
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = library(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert behind.max() < 1e-3
        ties += int((behind > 0).sum())
    assert ties <= 2
