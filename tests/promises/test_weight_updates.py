"""`update_weights` of engines with real models: afterwards to the bit those of the new checkpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints import Checkpoint
from support.panels import use_panels
from support.peft_checkpoints import make_peft

from asyncengine import AsyncEngine, Engine, InvalidParameter, ModelNotFound, SamplingParams, UnsupportedModel
from asyncengine.testing import assert_nothing_held

PROMPTS = [[3 + i, *range(7, 40), 5] for i in range(4)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=True, top_logprobs=3, ignore_eos=True)
FORMS: list[tuple[str, str, Any]] = [
    ("qwen3", "bfloat16", None), ("qwen3", "float32", "int8"), ("llama", "bfloat16", "int4"),
]  # fmt: skip
"""qwen3 is tied."""


@pytest.fixture(scope="module")
def adapters(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("peft")
    made = {}
    for name in ("qwen3", "llama"):
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
        made[name] = str(tmp_path_factory.mktemp("adapters") / name)
        dora = name == "llama"  # whose norms are of the weights that were written last
        make_peft(base, 1, target_modules="all-linear", use_dora=dora).save_pretrained(made[name])
    return made


def engine_on(folder: Path, **settings: Any) -> Any:
    return AsyncEngine.from_pretrained(folder, kv_cache_memory="4MB", num_threads=1, show_progress=False, **settings)


async def answers(engine: AsyncEngine) -> list[Any]:
    """Answers to requests together, with and without an adapter, and to one alone."""
    calls = [engine.generate(prompt, PARAMS, adapter="a" if i % 2 else None) for i, prompt in enumerate(PROMPTS)]
    found = [*await asyncio.gather(*calls), await engine.generate(PROMPTS[0], PARAMS)]
    return [(each.token_ids, each.logprobs) for each in found]


@pytest.mark.parametrize(("name", "dtype", "quantization"), FORMS)
async def test_afterwards_it_is_an_engine_on_the_new_checkpoint(
    name: str, dtype: str, quantization: Any, checkpoint: Checkpoint, adapters: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Earlier requests left cached pages, drafts and adapters; weights come by path, and back by tensors."""
    pytest.importorskip("numba")
    use_panels(True, monkeypatch)
    settings = {"dtype": dtype, "quantization": quantization, "adapters": {"a": adapters[name]}}
    async with (
        await engine_on(checkpoint(name), **settings) as live,
        await engine_on(checkpoint(name, seed=1), **settings) as fresh,
    ):
        before = await answers(live)
        assert live.stats().pages.cached
        await live.update_weights(checkpoint(name, seed=1))
        assert not live.stats().pages.cached
        assert await answers(live) == await answers(fresh) != before
        running = asyncio.create_task(live.generate(PROMPTS[1], PARAMS.replace(max_tokens=200)))
        await live.update_weights(load_file(checkpoint(name) / "model.safetensors"), mode="recompute")
        assert await answers(live) == before
        assert len((await running).token_ids) == 200
        assert_nothing_held(live.core)


async def test_a_part_of_the_tensors(checkpoint: Checkpoint) -> None:
    """Nothing that the replaced ones computed is used, async and blocking; the rest has stayed."""
    first, second = (load_file(checkpoint("qwen3", seed=seed) / "model.safetensors") for seed in (0, 1))
    attention = {name: tensor for name, tensor in second.items() if ".self_attn." in name}
    async with await engine_on(checkpoint("qwen3"), hosted=True) as live, await engine_on(checkpoint("qwen3")) as fresh:
        before = [await live.generate(prompt, PARAMS) for prompt in PROMPTS]
        await live.update_weights(attention, partial=True)
        await fresh.update_weights({**first, **attention})
        between = [await live.generate(prompt, PARAMS) for prompt in PROMPTS]
        again = [await fresh.generate(prompt, PARAMS) for prompt in PROMPTS]
        assert [each.logprobs for each in between] == [each.logprobs for each in again]
        assert [each.logprobs for each in between] != [each.logprobs for each in before]
        old = {name: first[name] for name in attention}
        await asyncio.to_thread(lambda: Engine(live).update_weights(old, partial=True))
        after = [await live.generate(prompt, PARAMS) for prompt in PROMPTS]
        assert [each.logprobs for each in after] == [each.logprobs for each in before]
        with pytest.raises(InvalidParameter, match=r"^partial: must be True or False"):
            await live.update_weights(old, partial="yes")  # type: ignore[arg-type]
        with pytest.raises(ModelNotFound, match="lacks the tensor"):
            await live.update_weights(old)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
async def test_a_trainer_s_tensors_stay_what_they_are(name: str, checkpoint: Checkpoint) -> None:
    """transformers leaves a model's tensors in its own mapping of the file that the engine was loaded from."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
    async with await engine_on(checkpoint(name)) as live:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        await live.update_weights(model.state_dict())
        assert not [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])]


async def test_a_model_that_runs_through_transformers_says_so(checkpoint: Checkpoint) -> None:
    async with await engine_on(checkpoint("llama"), fuse=False) as engine:
        with pytest.raises(UnsupportedModel, match="runs through transformers"):
            await engine.update_weights(checkpoint("llama", seed=1))
