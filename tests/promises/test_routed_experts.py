"""`return_routed_experts`: the experts of each token in each layer are those that transformers' routers choose, however
the answer was computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from support.checkpoints import Checkpoint
from support.long import LONG
from support.tiny_models import make_model
from support.worded_model import make_worded_model

from asyncengine import Engine, SamplingParams
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar

pytest.importorskip("numba")

ROUTED = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True, return_routed_experts=True)
PLAIN = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
PROMPT = [(7 * place + 3) % 100 + 1 for place in range(90)]
SETTINGS: dict[str, Any] = {"kv_cache_memory": "8MB", "num_threads": 1, "show_progress": False, "dtype": "float32"}
BUSY: dict[str, Any] = {
    "max_num_batched_tokens": 48, "preempt_every": 7, "speculation_costs": (1.0, 1.0002, 1.0008), "page_size": 4,
}  # fmt: skip
"""Prompts in chunks, requests that give way and come back, guesses whenever there are any."""


def experts_of(name: str, ids: list[int]) -> NDArray[Any]:
    """[tokens, layers, experts of a token] that transformers' routers choose, best first."""
    model = make_model(name)
    count = getattr(model.config, "num_experts_per_tok", None) or model.config.top_k_experts
    found: list[torch.Tensor] = []

    def note(_: Any, __: Any, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)  # logits, or what grows with them

    hooks = [m.register_forward_hook(note) for m in model.modules() if type(m).__name__.endswith("Router")]
    with torch.inference_mode():
        model(torch.tensor([ids]))
    assert hooks
    return torch.stack([each.flatten(0, -2).topk(count).indices for each in found], 1).numpy()


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "gpt-oss", "gemma4moe"])
def test_experts_are_those_of_transformers(name: str, checkpoint: Checkpoint) -> None:
    """Experts of short steps and of long ones are right, for prompt and answer alike."""
    with Engine.from_pretrained(checkpoint(name), **SETTINGS) as engine:
        for prompt in (PROMPT, PROMPT[:9], PROMPT[:1]):
            done = engine.generate(prompt, ROUTED)
            assert done.routed_experts is not None
            assert done.routed_experts.dtype == np.uint8
            assert np.array_equal(done.routed_experts, experts_of(name, prompt + done.token_ids)[:-1])
            assert done.samples[0].routed_experts is done.routed_experts


def replayed(engine: Engine, ids: list[int]) -> NDArray[Any]:
    """The experts of a text that is read as one prompt, all but its last token."""
    found = engine.generate(ids, ROUTED.replace(max_tokens=1)).routed_experts
    assert found is not None
    return found[:-1]


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3.5moe", "gpt-oss"] if LONG else ["qwen3.5moe", "gpt-oss"])
def test_experts_do_not_depend_on_how_they_are_computed(name: str, checkpoint: Checkpoint) -> None:
    """Requests run in chunks, with guesses, after preemption and beside others that do not ask; with several samples of
    one prompt; and asking changes no answer."""
    prompts = [PROMPT, PROMPT[:30] + PROMPT[:20], PROMPT[:6] * 6, PROMPT[:70]]
    with (
        Engine.from_pretrained(checkpoint(name), **SETTINGS) as quiet,
        Engine.from_pretrained(checkpoint(name), **SETTINGS, **BUSY) as engine,
    ):
        expected = [quiet.generate(prompt, PLAIN).token_ids for prompt in prompts]
        streams = [
            engine.stream(prompt, params.replace(n=n))
            for prompt in prompts
            for params, n in ((ROUTED, 1), (PLAIN, 1), (ROUTED, 3), (ROUTED.replace(routed_experts_start=5), 2))
        ]
        done = [stream.result() for stream in streams]
        stats = engine.stats()
        assert stats.preemptions
        assert name == "qwen3.5moe" or stats.speculation.drafted > stats.speculation.accepted > 0
        for place, prompt in enumerate(prompts):
            one, plain, several, later = done[4 * place : 4 * place + 4]
            assert one.token_ids == plain.token_ids == expected[place]
            assert plain.routed_experts is None
            for found, start in ((one, 0), (several, 0), (later, 5)):
                for sample in found.samples:
                    assert np.array_equal(sample.routed_experts, replayed(quiet, prompt + sample.token_ids)[start:])


def test_a_cached_prefix_is_used_as_far_as_nothing_is_asked_of_it(checkpoint: Checkpoint) -> None:
    with Engine.from_pretrained(checkpoint("mixtral"), page_size=4, **SETTINGS) as engine:
        whole = engine.generate(PROMPT, ROUTED)
        again = engine.generate(PROMPT, ROUTED)
        assert again.usage.cached_tokens == 0
        assert np.array_equal(again.routed_experts, whole.routed_experts)
        for start in (1, 4, 50, 89, 90):
            done = engine.generate(PROMPT, ROUTED.replace(routed_experts_start=start, return_routed_experts=False))
            assert done.usage.cached_tokens == start // 4 * 4
            assert done.token_ids == whole.token_ids
            assert np.array_equal(done.routed_experts, whole.routed_experts[start:])


@pytest.fixture(scope="module", params=[1, 2], ids=["one step in flight", "two"])
def worded(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Engine]:
    """A mixture with a tokenizer."""
    folder = make_worded_model(
        tmp_path_factory.mktemp("worded") / "model", kind=transformers.MixtralConfig, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    settings = {**SETTINGS, "page_size": 4, "preempt_every": 5}
    with Engine.from_pretrained(folder, max_steps_in_flight=request.param, **settings) as engine:
        yield engine


def test_tokens_that_a_grammar_forces_or_replaces_have_their_own_experts(worded: Engine) -> None:
    """An earlier request may have left them in the cache."""
    schema = {"type": "object", "properties": {"a_long_name": {"enum": ["one of few", "one of many"]}},
              "required": ["a_long_name"], "additionalProperties": False}  # fmt: skip
    params = ROUTED.replace(max_tokens=60, grammar=Grammar.json_schema(schema), ignore_eos=False)
    prompt = list(range(5, 25))
    for _ in range(2):
        streams = [worded.stream(prompt, params.replace(seed=seed)) for seed in range(4)]
        for done in [stream.result() for stream in streams]:
            assert np.array_equal(done.routed_experts, replayed(worded, prompt + done.token_ids))


def test_an_answer_that_ends_early_has_the_experts_of_what_it_holds(worded: Engine) -> None:
    prompt = list(range(5, 25))
    whole = worded.generate(prompt, ROUTED)
    done = worded.generate(prompt, ROUTED.replace(stop=(whole.text[len(whole.text) // 2],)))
    assert done.finish_reason == "stop"
    assert len(done.token_ids) < 20
    assert np.array_equal(done.routed_experts, replayed(worded, prompt + done.token_ids))
    with worded.stream(prompt, ROUTED) as stream:
        next(stream)
        stream.abort()
        left = stream.result()
    assert len(left.routed_experts) == len(prompt) + len(left.token_ids) - 1


def test_where_there_are_none_is_said_by_name(checkpoint: Checkpoint) -> None:
    for name, settings, reason in (
        ("qwen3", {}, "the model has no experts"), ("mixtral", {"fuse": False}, "transformers' modules"),
    ):  # fmt: skip
        with Engine.from_pretrained(checkpoint(name), **SETTINGS, **settings) as engine:
            assert reason in str(engine.info.no_routed_experts)
            with pytest.raises(InvalidParameter, match=f"return_routed_experts: cannot be had: .*{reason}"):
                engine.generate(PROMPT, ROUTED)
    with Engine.from_pretrained(checkpoint("mixtral"), **SETTINGS) as engine:
        assert engine.info.no_routed_experts is None
        with pytest.raises(InvalidParameter, match="routed_experts_start: must not exceed the 90 tokens"):
            engine.generate(PROMPT, ROUTED.replace(routed_experts_start=91))


def test_completions_can_be_compared(checkpoint: Checkpoint) -> None:
    with Engine.from_pretrained(checkpoint("mixtral"), **SETTINGS) as engine:
        one, two = (engine.generate(PROMPT, ROUTED).samples[0] for _ in range(2))
    assert one == two
    assert "routed_experts" in [each.name for each in fields(one)]
