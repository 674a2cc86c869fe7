"""`return_hidden_states` and `steering_vectors`: those of transformers, and the same to the bit however a request is
computed."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.checkpoints import make_checkpoint
from support.worded_model import make_worded_model

from asyncengine import AsyncEngine, Engine, InvalidParameter, SamplingParams

PROMPT = "A list of things, with many words in it, so that it is longer than a page of the cache, or even two of them."
SETTINGS: dict[str, dict[str, Any]] = {
    "one step at a time": {"max_steps_in_flight": 1, "speculation": "off"},
    "in chunks, preempted": {"max_steps_in_flight": 2, "preempt_every": 4, "max_num_batched_tokens": 24},
    "guesses": {"speculation": "lookup"},
}
PLAIN = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_worded_model(tmp_path_factory.mktemp("worded"))


async def test_they_are_those_of_transformers(folder: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first: np.ndarray[Any, Any] | None = None
    for name, settings in SETTINGS.items():
        async with await AsyncEngine.from_pretrained(
            folder, dtype="float32", kv_cache_memory="4MB", num_threads=1, **settings
        ) as engine:
            assert engine.info.num_layers == 2
            asked = PLAIN.replace(return_hidden_states=[0, -1, 1], hidden_states_start=0)
            plain = await engine.generate(PROMPT, PLAIN)
            found, other, drawn = await asyncio.gather(
                engine.generate(PROMPT, asked), engine.generate("Who is there?", PLAIN),
                engine.generate(PROMPT, PLAIN.replace(n=2, temperature=1.0, seed=2, return_hidden_states="last")),
            )  # fmt: skip
            assert (found.token_ids, plain.hidden_states, other.hidden_states) == (plain.token_ids, None, None), name
            ids = engine.tokenize(PROMPT)
            for sample, layers in ((found.samples[0], (0, 2, 1)), *((sample, (2,)) for sample in drawn.samples)):
                with torch.inference_mode():
                    given = model(torch.tensor([ids + sample.token_ids]), output_hidden_states=True).hidden_states
                expected = torch.stack([given[layer][0] for layer in layers], dim=1)[:-1].numpy()
                assert sample.hidden_states is not None, name
                assert sample.hidden_states.shape == expected.shape
                np.testing.assert_allclose(sample.hidden_states, expected, rtol=1e-4, atol=2e-4, err_msg=name)
            later = await engine.generate(PROMPT, asked.replace(hidden_states_start=len(ids) - 3))
            assert later.usage.cached_tokens > 0
            assert found.hidden_states is not None
            assert np.array_equal(later.hidden_states, found.hidden_states[len(ids) - 3 :])
            first = found.hidden_states if first is None else first
            assert np.array_equal(found.hidden_states, first), name


def add(vector: torch.Tensor, layer: Any, given: Any, made: torch.Tensor) -> torch.Tensor:
    return made + vector


async def test_steering_is_that_of_hooks(folder: Path) -> None:
    """In any company, and no prefix is shared with a request that is steered otherwise."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(1)
    width = model.config.hidden_size
    vectors = [{1: rng.normal(size=width)}, {2: 3 * rng.normal(size=width)}, {1: np.ones(width), 2: -np.ones(width)}]
    first: list[Any] | None = None
    for name, settings in SETTINGS.items():
        async with await AsyncEngine.from_pretrained(
            folder, dtype="float32", kv_cache_memory="4MB", num_threads=1, **settings
        ) as engine:
            asked = [PLAIN.replace(steering_vectors=each, return_hidden_states=[1, 2]) for each in vectors]
            plain = await engine.generate(PROMPT, PLAIN)
            alone = [await engine.generate(PROMPT, params) for params in asked]
            again = await asyncio.gather(*(engine.generate(PROMPT, params) for params in (PLAIN, *asked)))
            lone = await engine.generate(PROMPT, asked[0].replace(return_hidden_states=()))
            assert lone.usage.cached_tokens > 0, "it is shared with those that are steered in the same way"
            assert lone.token_ids == alone[0].token_ids, name
            assert again[0].token_ids == plain.token_ids, name
            ids = engine.tokenize(PROMPT)
            for added, found, beside in zip(vectors, alone, again[1:], strict=True):
                tensors = {layer: torch.tensor(vector, dtype=torch.float32) for layer, vector in added.items()}
                hooks = [  # before those by which transformers takes the hidden states
                    model.model.layers[layer - 1].register_forward_hook(partial(add, vector), prepend=True)
                    for layer, vector in tensors.items()
                ]
                with torch.inference_mode():
                    made = model(torch.tensor([ids + found.token_ids]), output_hidden_states=True)
                for hook in hooks:
                    hook.remove()
                assert found.token_ids == made.logits[0, len(ids) - 1 : -1].argmax(-1).tolist(), name
                assert found.token_ids != plain.token_ids
                expected = torch.stack([made.hidden_states[layer][0] for layer in (1, 2)], dim=1)[:-1].numpy()
                np.testing.assert_allclose(found.hidden_states, expected, rtol=1e-4, atol=2e-4, err_msg=name)
                assert beside.token_ids == found.token_ids, name
                assert np.array_equal(beside.hidden_states, found.hidden_states), name
            first = first or alone
            assert all(np.array_equal(a.hidden_states, b.hidden_states) for a, b in zip(alone, first, strict=True))


def test_layers_without_keys_count(tmp_path: Path) -> None:
    make_checkpoint("qwen3.5", tmp_path)
    with Engine.from_pretrained(tmp_path, kv_cache_memory="4MB", show_progress=False) as engine:
        layers = engine.info.num_layers
        assert layers == 4
        plain, asked = PLAIN, PLAIN.replace(return_hidden_states=range(layers + 1))
        steered = plain.replace(steering_vectors={layers: np.full(engine.info.hidden_size, 5.0)})
        found = engine.generate([5, 6, 7], asked)
        assert found.hidden_states is not None
        assert found.hidden_states.shape[1] == layers + 1
        assert engine.generate([5, 6, 7], steered).token_ids != found.token_ids


def test_what_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="cannot go with return_routed_experts"):
        SamplingParams(return_hidden_states="last", return_routed_experts=True)  # type: ignore[arg-type]
    with Engine.from_pretrained(folder, kv_cache_memory="4MB", show_progress=False) as engine:
        for layers in ([3], [-4], [0, 9]):
            with pytest.raises(InvalidParameter, match="return_hidden_states: must be between -3 and 2"):
                engine.generate("a", PLAIN.replace(return_hidden_states=layers))
        with pytest.raises(InvalidParameter, match="hidden_states_start: must not exceed"):
            engine.generate("a", PLAIN.replace(return_hidden_states=[1], hidden_states_start=99))
        wrong: list[tuple[Any, str]] = [
            ({3: [0.0] * 64}, "steering_vectors: must be between 1 and 2"),
            ({1: [1.0]}, r"steering_vectors\[1\]: must have 48 numbers"),
            ({1: ["a"]}, "map layers to sequences of numbers"), ({1: [float("inf")]}, "must have finite numbers"),
            ([1.0], "must map layers to vectors"), ({0: [1.0]}, "steering_vectors: must be"),
        ]  # fmt: skip
        for value, limit in wrong:
            with pytest.raises(InvalidParameter, match=limit):
                engine.generate("a", PLAIN.replace(steering_vectors=value))
    refused = pytest.raises(InvalidParameter, match="return_hidden_states: cannot be had: its layers are transformers")
    with Engine.from_pretrained(folder, kv_cache_memory="4MB", show_progress=False, fuse=False) as engine, refused:
        engine.generate("a", PLAIN.replace(return_hidden_states="last"))
