"""Every form of adapter that peft writes, in one batch with the base model: the same tokens as peft over transformers,
and each alone the same to the bit as in company."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data import cases_of
from support.drive import greedy_reference
from support.lora_driver import make_driver
from support.lora_reference import Weights
from support.lora_zoo import quiet, random_prompts
from support.panels import use_panels
from support.tiny_models import make_checkpoint, make_model

from asyncengine import AdapterError, AsyncEngine
from asyncengine.lora.checkpoint.peft_loader import PeftLoader
from asyncengine.seams import LoraWeights

from .lora_engine import assert_given_back, greedy

pytest.importorskip("peft")

WANT = 6
PROMPTS = random_prompts([5, 37, 37])
CASES = cases_of(__file__)
FORMS: dict[str, dict[str, Any]] = CASES["forms"]
"""Settings of peft. Tokens whose rows are trained are some of the prompts'."""
FAMILIES: dict[str, list[str]] = CASES["families"]
"""Gemma 3's output layer is its embedding, which is scaled, as is GPT-2's, whose matrices are transposed; Qwen 2 has
biases."""


class Forms:
    """Adapters of one family, one for each form, saved by peft with random weights, and what peft answers with them."""

    def __init__(self, family: str, folder: Path, forms: list[str]) -> None:
        import peft

        self.model = make_checkpoint(family, folder / "model")
        self.paths: dict[str, Path] = {}
        self._base = make_model(family)
        self._family = family
        for place, form in enumerate(forms):
            settings = {"r": 4, "lora_alpha": 6, **FORMS[form]}
            with quiet():
                config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
                wrapped = peft.get_peft_model(make_model(family), config)
                draw(wrapped, place)
                self.paths[form] = folder / f"a{place}"
                wrapped.save_pretrained(self.paths[form])
        self._answers: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}

    def answer(self, form: str | None, prompt: list[int]) -> list[int]:
        import peft

        key = form, tuple(prompt)
        if key not in self._answers:
            with quiet():
                model = make_model(self._family)
                if form is not None:
                    model = peft.PeftModel.from_pretrained(model, self.paths[form]).base_model.model
            for each in PROMPTS:
                self._answers[form, tuple(each)] = greedy_reference(model.eval(), each, WANT)
        return self._answers[key]


def draw(wrapped: Any, seed: int) -> None:
    """Random numbers for everything that peft trains, of sizes that change answers without drowning the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_B" in name or "lora_embedding" in name:
                parameter.copy_(noise * 0.1)
            elif "lora_A" in name:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            elif parameter.requires_grad:
                parameter.add_(noise * 0.3 * parameter.std())


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: Forms(family, tmp_path_factory.mktemp(family), FAMILIES[family]))


def load(forms: Forms, **settings: Any) -> Any:
    settings = {"kv_cache_memory": "4MB", "max_loras": 16, "num_threads": 1, **settings}
    return AsyncEngine.from_pretrained(forms.model, dtype="float32", **settings)


async def ask(engine: AsyncEngine, form: str | None, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens, and their log-probabilities."""
    made = await engine.generate(prompt, greedy(WANT, logprobs=True), adapter=form)
    return made.token_ids, [entry.logprob for entry in made.logprobs]


@pytest.mark.parametrize("family", FAMILIES)
async def test_all_forms_in_one_batch_equal_peft(family: str, forms: Any) -> None:
    known: Forms = forms(family)
    jobs = [(form, prompt) for prompt in PROMPTS for form in (None, *known.paths)]
    expected = [known.answer(form, prompt) for form, prompt in jobs]
    assert len({str(tokens) for tokens in expected}) > len(expected) - 3, "equality means something"
    async with await load(known, adapters=known.paths, max_num_batched_tokens=64) as engine:
        made = await asyncio.gather(*(ask(engine, form, prompt) for form, prompt in jobs))
        assert [tokens for tokens, _ in made] == expected
        steady = engine.info.batch_variance is None
        for (form, prompt), together in list(zip(jobs, made, strict=True))[: steady * (len(known.paths) + 1)]:
            assert await ask(engine, form, prompt) == together, f"{form} alone"
        await assert_given_back(engine)


TIGHT: dict[str, Any] = {"max_num_batched_tokens": 16, "max_loras": 2, "preempt_every": 5, "page_size": 16}


async def test_few_slots_chunks_and_preemption(forms: Any) -> None:
    """Slots change hands all the time, each leaving nothing of its last content; adapters come and go as it runs."""
    known: Forms = forms("qwen2")
    jobs = [(form, prompt) for prompt in PROMPTS[1:] for form in (None, *known.paths, None)]
    expected = [known.answer(form, prompt) for form, prompt in jobs]
    async with await load(known, **TIGHT) as engine:
        for form, path in known.paths.items():
            await engine.load_adapter(form, path)
        for again in range(2):
            made = await asyncio.gather(*(ask(engine, form, prompt) for form, prompt in jobs))
            assert [tokens for tokens, _ in made] == expected, again
            for form in list(known.paths)[again::2]:
                await engine.unload_adapter(form)
                await engine.load_adapter(form, known.paths[form])
        assert engine.stats().preemptions > 0
        await assert_given_back(engine)


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt2"])
async def test_through_transformers_own_modules(family: str, forms: Any) -> None:
    known: Forms = forms(family)
    jobs = [(form, prompt) for prompt in PROMPTS[:2] for form in (None, *known.paths)]
    async with await load(known, adapters=known.paths, fuse=False) as engine:
        made = await asyncio.gather(*(ask(engine, form, prompt) for form, prompt in jobs))
        assert [tokens for tokens, _ in made] == [known.answer(form, prompt) for form, prompt in jobs]


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt2"])
def test_the_same_shapes_in_every_step(family: str, forms: Any) -> None:
    """The masked form, which a GPU's graphs have."""
    known: Forms = forms(family)
    driver = make_driver(lambda _: known.model, family, 12, 8, masked=True)
    loader = PeftLoader(driver.lora.modules, dtype=torch.float32, max_rank=8)
    version = driver.lora.version
    for slot, (form, path) in enumerate(known.paths.items(), 1):
        driver.lora.write(slot, loader.load(form, path))
    assert driver.lora.version > version
    jobs = [driver.with_adapter(PROMPTS[0], slot, WANT) for slot in range(len(known.paths) + 1)]
    assert driver.run(jobs) == [known.answer(form, PROMPTS[0]) for form in (None, *known.paths)]
    if "tables" in known.paths:
        version = driver.lora.version
        driver.lora.clear(1 + list(known.paths).index("tables"))
        assert driver.lora.version == version + 2, "graphs that read these tables are stale"


async def test_a_smaller_vocabulary_has_no_other_tokens(tmp_path: Path) -> None:
    """Trainers cut padded vocabularies: peft's logits end there, and here the tokens behind have no chance."""
    import peft

    model, rows = make_checkpoint("llama", tmp_path / "model"), 150
    with quiet():
        base = make_model("llama")
        base.resize_token_embeddings(rows)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
        )
        wrapped = peft.get_peft_model(base, config)
        draw(wrapped, 3)
        wrapped.save_pretrained(tmp_path / "small")
    prompts = [[token % rows for token in prompt] for prompt in PROMPTS]
    expected = [greedy_reference(wrapped.base_model.model.eval(), prompt, WANT) for prompt in prompts]
    async with await AsyncEngine.from_pretrained(model, dtype="float32", adapters={"a": tmp_path / "small"}) as engine:
        made = [await engine.generate(prompt, greedy(WANT), adapter="a") for prompt in prompts]
        assert [each.token_ids for each in made] == expected
        pushed = greedy(WANT, logit_bias={155: 100.0})
        assert 155 not in (await engine.generate(prompts[0], pushed, adapter="a")).token_ids
        assert 155 in (await engine.generate(prompts[0], pushed)).token_ids


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16")])
def test_norms_of_a_quantized_weight_are_of_the_numbers_it_stands_for(
    quantization: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Magnitudes that are those norms change nothing; the columns of the weight come from products with unit rows."""
    pytest.importorskip("numba")
    use_panels(True, monkeypatch)
    folder = make_checkpoint("llama", tmp_path)
    driver = make_driver(lambda _: folder, "llama", quantization=quantization, dtype=dtype)
    model: Any = driver.runner.model
    modules = {}
    for layer in model.layers:
        for linear in layer.linears():
            columns = linear.weight.multiply(torch.eye(linear.inputs, dtype=model.dtype), None).float()
            norms = torch.linalg.vector_norm(columns, dim=0).split([part.outputs for part in linear.matrices])
            for part, magnitude in zip(linear.matrices, norms, strict=True):
                a, b = torch.empty(0, linear.inputs), torch.empty(part.outputs, 0)
                modules[part.path] = LoraWeights(part.path, a, b, magnitude=magnitude)
    driver.lora.write(1, Weights(modules).to(model.dtype))
    for changes in driver.lora._outputs.values():
        torch.testing.assert_close(changes._factors[0], torch.ones_like(changes._factors[0]), rtol=1e-2, atol=0)
    assert driver.scores(1) == pytest.approx(driver.scores(0), abs=0.2)


@pytest.mark.parametrize("setting", ["tensor_parallel", "pipeline_parallel"])
async def test_over_two_processes(setting: str, forms: Any) -> None:
    """Each rank, or stage, changes the outputs that it computes; DoRA's norms would need rows that other ranks have."""
    pytest.importorskip("numba")
    known: Forms = forms("qwen2")
    spread = setting == "tensor_parallel"
    served = [form for form in known.paths if not (spread and FORMS[form].get("use_dora"))]
    jobs = [(form, prompt) for prompt in PROMPTS[:2] for form in (None, *served)]
    adapters = {form: known.paths[form] for form in served}
    async with await load(known, adapters=adapters, **{setting: 2, "num_threads": 2}) as engine:
        made = await asyncio.gather(*(ask(engine, form, prompt) for form, prompt in jobs))
        assert [tokens for tokens, _ in made] == [known.answer(form, prompt) for form, prompt in jobs]
        if spread:
            with pytest.raises(AdapterError, match="spread over several processes"):
                await engine.load_adapter("dora", known.paths["dora"])
