"""`logits_processors`: the caller's own functions, with the tokens of transformers' loop, in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.worded_model import EOS, Reference, make_worded_model

from asyncengine import AsyncEngine, Engine, InvalidParameter, RequestFailed, SamplingParams
from asyncengine.grammar import Grammar

PROMPTS = ["Who is there?", "A list of things, with many words in it, so that it is longer than a page.", "x"]
SETTINGS: dict[str, dict[str, Any]] = {
    "one step at a time": {"max_steps_in_flight": 1, "speculation": "off"},
    "two in flight, preempted, with guesses": {"max_steps_in_flight": 2, "preempt_every": 4, "speculation": "lookup"},
}


def theirs(processor: Any) -> Callable[..., torch.Tensor]:
    """A processor of transformers in the engine's form."""
    return lambda prompt, output, logits: processor(torch.tensor([prompt + output]), logits[None])[0]


def made(prompt_len: int) -> list[Any]:
    return [
        transformers.NoRepeatNGramLogitsProcessor(2),
        transformers.ExponentialDecayLengthPenalty((3, 1.2), EOS[0], prompt_len),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded_model(tmp_path_factory.mktemp("worded"))


async def open_engine(folder: Path, **settings: Any) -> AsyncEngine:
    given: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MB", "num_threads": 1, **settings}
    return await AsyncEngine.from_pretrained(folder, **given)


async def test_answers_equal_those_of_transformers(folder: Path) -> None:
    reference = Reference(folder)
    for name, settings in SETTINGS.items():
        calls: list[int] = []

        def spy(prompt: list[int], output: list[int], logits: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(len(output))
            return logits

        async with await open_engine(folder, **settings) as engine:
            jobs, expected = [], []
            for prompt in map(engine.tokenize, PROMPTS):
                params = SamplingParams(temperature=0, max_tokens=20)
                own = [*map(theirs, made(len(prompt))), spy]
                jobs += [(prompt, params), (prompt, params.replace(logits_processors=own))]
                expected += [reference.greedy(prompt, 20), reference.greedy(prompt, 20, made(len(prompt)))]
            assert expected[0] != expected[1]
            answers = await asyncio.gather(*(engine.generate(*job) for job in jobs))
            assert [answer.token_ids for answer in answers] == expected, name
            lengths = [len(tokens) for tokens in expected[1::2]]
            assert sorted(calls) == sorted(at for length in lengths for at in range(length)), "once for each token"


async def test_draws_scores_chats_and_grammars_go_with_it(folder: Path) -> None:
    only = [300, 301, 302]

    def of_three(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(logits, -float("inf"))
        kept[only] = logits[only]
        return kept

    async with await open_engine(folder, chat_template="chatml") as engine:
        asked = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, logits_processors=of_three)
        drawn = await engine.generate("Well?", asked.replace(logprobs_of="sampled", top_logprobs=4))
        for sample in drawn.samples:
            assert set(sample.token_ids) <= {*only}
            assert all(len(entry.top) == 3 for entry in sample.logprobs or ())
        plain = await engine.generate("Well?", asked)
        assert [sample.token_ids for sample in plain.samples] == [sample.token_ids for sample in drawn.samples]
        chat = await engine.chat([{"role": "user", "content": "Well?"}], asked)
        assert {token for sample in chat.samples for token in sample.token_ids} <= {*only}
        everything = asked.replace(n=1, logits_processors=[lambda prompt, output, logits: torch.ones_like(logits)])
        forced = await engine.generate("Well?", everything.replace(grammar=Grammar.choice(["yes"])))
        assert forced.text == "yes", "a grammar's mask comes behind it"


async def test_an_error_ends_its_own_request_alone(folder: Path) -> None:
    def fails(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 3:
            raise KeyError("no such word")
        return logits

    async with await open_engine(folder) as engine:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = await engine.generate("Well?", params)
        bad = [fails, lambda prompt, output, logits: logits[:5], lambda prompt, output, logits: None]
        others = [engine.generate("Well?", params.replace(logits_processors=[each])) for each in bad]
        *failed, answer = await asyncio.gather(*others, engine.generate("Well?", params), return_exceptions=True)
        assert answer.token_ids == expected.token_ids  # type: ignore[union-attr]
        assert all(isinstance(error, RequestFailed) for error in failed)
        assert "a logits processor failed: KeyError('no such word')" in str(failed[0])
        assert all("must return a tensor of shape [2048]" in str(error) for error in failed[1:])
        void = params.replace(logits_processors=lambda prompt, output, logits: logits - float("inf"))
        with pytest.raises(RequestFailed, match="logits_processors and min_tokens exclude all"):
            await engine.generate("Well?", void)


def test_what_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="logits_processors: must be functions of"):
        SamplingParams(logits_processors=[5])
    params = SamplingParams(max_tokens=2, logits_processors=[lambda prompt, output, logits: logits])
    with Engine.from_pretrained(folder, kv_cache_memory="4MB", show_progress=False) as engine:
        assert len(engine.generate("a", params).token_ids) == 2
        for guessed in ({"speculation": True}, {"prediction": "b"}):
            with pytest.raises(InvalidParameter, match="logits_processors: cannot go with speculation or a prediction"):
                engine.generate("a", params, **guessed)  # type: ignore[arg-type]
