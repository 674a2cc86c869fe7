"""`return_hidden_states`: those of transformers, and the same to the bit however a request is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
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


def test_what_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="cannot go with return_routed_experts"):
        SamplingParams(return_hidden_states="last", return_routed_experts=True)  # type: ignore[arg-type]
    with Engine.from_pretrained(folder, kv_cache_memory="4MB", show_progress=False) as engine:
        for layers in ([3], [-4], [0, 9]):
            with pytest.raises(InvalidParameter, match="return_hidden_states: must be between -3 and 2"):
                engine.generate("a", PLAIN.replace(return_hidden_states=layers))
        with pytest.raises(InvalidParameter, match="hidden_states_start: must not exceed"):
            engine.generate("a", PLAIN.replace(return_hidden_states=[1], hidden_states_start=99))
    refused = pytest.raises(InvalidParameter, match="return_hidden_states: cannot be had: its layers are transformers")
    with Engine.from_pretrained(folder, kv_cache_memory="4MB", show_progress=False, fuse=False) as engine, refused:
        engine.generate("a", PLAIN.replace(return_hidden_states="last"))
