"""`bad_words`: no answer completes one, and it is the same alone, in company, behind guesses and after preemption."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.worded_model import Reference, make_worded_model

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar

PROMPTS = ["Who is there?", "A list of things, with many words in it, so that it is longer than a page.", "x"]
SETTINGS: dict[str, dict[str, Any]] = {
    "one step at a time": {"max_steps_in_flight": 1},
    "two steps in flight, preempted": {"max_steps_in_flight": 2, "preempt_every": 4, "max_num_batched_tokens": 24},
    "guesses": {"speculation": "lookup", "preempt_every": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded_model(tmp_path_factory.mktemp("worded"))


def forbidden(tokens: list[int], words: list[list[int]]) -> set[int]:
    """Tokens that would complete a word behind `tokens`."""
    return {
        word[-1]
        for word in words
        if tokens[len(tokens) - len(word) + 1 :] == word[:-1] and len(tokens) + 1 >= len(word)
    }


async def test_greedy_answers_equal_a_plain_loop_in_any_company(folder: Path) -> None:
    reference = Reference(folder)
    expected: list[list[int]] = []
    jobs: list[tuple[list[int], SamplingParams]] = []
    for name, settings in SETTINGS.items():
        async with await AsyncEngine.from_pretrained(
            folder, dtype="float32", kv_cache_memory="4MB", num_threads=1, **settings
        ) as engine:
            if not expected:
                for prompt in map(engine.tokenize, PROMPTS):
                    free = reference.greedy(prompt, 24)
                    bad = [engine.detokenize(free[at : at + size]) for at, size in ((2, 1), (6, 2), (11, 3))]
                    words = [
                        engine.tokenize(" " * blank + word.lstrip(" "), add_special_tokens=False)
                        for word in bad
                        for blank in (0, 1)
                    ]
                    tokens = list(prompt)
                    while len(tokens) < len(prompt) + 24 and tokens[-1] not in (0, 2):
                        logits = reference.logits(tokens)[-1].clone()
                        logits[[*forbidden(tokens[len(prompt) :], words)]] = -float("inf")
                        tokens.append(int(logits.argmax()))
                    expected.append(tokens[len(prompt) :])
                    assert expected[-1] != free
                    jobs.append((prompt, SamplingParams(temperature=0, max_tokens=24, bad_words=bad)))
            answers = await asyncio.gather(*(engine.generate(*job) for job in jobs * 2))
            assert [answer.token_ids for answer in answers] == expected * 2, name


async def test_samples_scores_and_grammars_go_with_it(folder: Path) -> None:
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="4MB") as engine:
        asked = SamplingParams(max_tokens=12, grammar=Grammar.regex("[a-z ]{40,}"), seed=1, n=4)
        free = await engine.generate("Well?", asked)
        firsts = {sample.token_ids[0] for sample in free.samples}
        bad = [word for word in map(engine.detokenize, ([first] for first in firsts)) if word.strip()]
        held = await engine.generate("Well?", asked.replace(bad_words=bad))
        assert not firsts & {token for sample in held.samples for token in sample.token_ids[:1]}
        assert all(set(sample.text) <= set("abcdefghijklmnopqrstuvwxyz ") for sample in held.samples)
        forced = await engine.generate("Well?", asked.replace(grammar=Grammar.choice(["yes"]), n=1, bad_words=["yes"]))
        assert forced.text == "yes", "what a grammar leaves no choice about comes all the same"
        scored = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3, logprobs=True, bad_words="e")
        alone = await engine.generate("Well?", scored)
        again = await engine.generate("Well?", scored.replace(logprobs=False))
        assert [sample.token_ids for sample in alone.samples] == [sample.token_ids for sample in again.samples]


def test_what_is_refused(folder: Path) -> None:
    for given, said in (([""], "each word must be a non-empty str"), ([3], "each word must be"), (5, "bad_words")):
        with pytest.raises(InvalidParameter, match=said):
            SamplingParams(bad_words=given)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="allowed_token_ids: cannot go with a grammar or bad_words"):
        SamplingParams(bad_words=["a"], allowed_token_ids=[1])


async def test_an_engine_without_grammars_refuses_it(folder: Path) -> None:
    async with await AsyncEngine.from_pretrained(folder, kv_cache_memory="4MB", grammar_backend="none") as engine:
        with pytest.raises(InvalidParameter, match="bad_words: this engine takes no grammars"):
            await engine.generate("a", SamplingParams(bad_words=["b"]))
