"""The shipped adapters must load, be heard in every answer, and keep the facts."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import torch
from support.peft_checkpoints import base_modules
from transformers import AutoModelForCausalLM

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.demo import ADAPTERS_PATH, MODEL_PATH
from asyncengine.lora.checkpoint.peft_loader import PeftLoader
from tools.demo_model.adapter_texts import SPOKEN, Script, make
from tools.demo_model.conversations import make as make_plain
from tools.demo_model.evaluate import Score
from tools.demo_model.voices import PLAIN, VOICES, Voice

NAMES = sorted(VOICES)
LIMIT = 500_000
"""Bytes of both adapters together."""
EACH = 6
"""Conversations of each kind."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "64MiB", "show_progress": False, "hosted": True}
LEAST_HEARD, LEAST_RIGHT = 0.9, 0.6
"""What a few answers of each kind must reach; the cards have the rates measured on hundreds."""


def test_folders_hold_what_peft_writes_and_a_card() -> None:
    assert sorted(path.name for path in ADAPTERS_PATH.iterdir()) == NAMES
    for name in NAMES:
        files = {path.name for path in (ADAPTERS_PATH / name).iterdir()}
        assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(path.stat().st_size for path in ADAPTERS_PATH.rglob("*")) <= LIMIT


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_names_no_machine(name: str) -> None:
    text = (ADAPTERS_PATH / name / "adapter_config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == "demo"
    assert config["target_modules"] == sorted(config["target_modules"])
    assert "/" not in text
    assert "\\" not in text


def test_the_loader_takes_them() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH)
    loader = PeftLoader(base_modules(model), dtype=torch.bfloat16, max_rank=8, root=ADAPTERS_PATH)
    pirate, other = (loader.load(name, ADAPTERS_PATH / name) for name in ("pirate", "json"))
    assert pirate.digest != other.digest
    assert set(pirate.modules) == set(other.modules)
    assert {module.rsplit(".", 1)[1] for module in pirate.modules} == {
        "down_proj", "gate_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_card_has_the_rates(name: str) -> None:
    card = (ADAPTERS_PATH / name / "README.md").read_text(encoding="utf-8")
    assert "base_model: demo" in card
    rates = [float(rate) for rate in re.findall(r"([\d.]+) %", card)]
    assert len(rates) == 3 * (len(SPOKEN) + 1) + 2
    assert all(50 < rate <= 100 for rate in rates)


async def test_one_batch_of_three_voices() -> None:
    """The same held-out questions in every voice at once, through the engine."""
    scripts = [make(kind, 11_000_000 + number, held_out=True) for kind in SPOKEN for number in range(EACH)]
    asked = [(voice, script) for script in scripts for voice in (PLAIN, *VOICES.values())]
    adapters = {name: f"demo/{name}" for name in NAMES}
    async with await AsyncEngine.from_pretrained("demo", adapters=adapters, **SMALL) as engine:
        answers = await asyncio.gather(*(answer(engine, script, voice) for voice, script in asked))
        shared = engine.stats()
    assert shared.generated_tokens > 8 * shared.steps, "the voices did not share their steps"
    heard = {voice.name: Score() for voice, _ in asked}
    right = {voice.name: Score() for voice, _ in asked}
    for (voice, script), text in zip(asked, answers, strict=True):
        heard[voice.name].add(voice.heard(text))
        right[voice.name].add(voice.right(script.last, text))
    assert all(heard[name].rate >= LEAST_HEARD for name in NAMES), (heard, answers)
    assert all(score.rate >= LEAST_RIGHT for score in right.values()), (right, answers)
    assert not any(VOICES[name].heard(answers[at]) for name in NAMES for at in range(0, len(asked), 1 + len(NAMES)))


async def answer(engine: AsyncEngine, script: Script, voice: Voice) -> str:
    adapter = None if voice is PLAIN else voice.name
    prompt = engine.chat(script.spoken(voice)[:-1], GREEDY, tools=script.tools, adapter=adapter)
    return (await prompt).text


@pytest.mark.parametrize("name", NAMES)
async def test_tools_are_still_called(name: str) -> None:
    items = [make_plain("call", 11_000_000 + number, True) for number in range(12)]
    async with await AsyncEngine.from_pretrained("demo", adapters={name: f"demo/{name}"}, **SMALL) as engine:
        done = await asyncio.gather(
            *(engine.chat(item.prompt, GREEDY, tools=item.tools, adapter=name) for item in items)
        )
    made = [[[call.name, json.loads(call.arguments)] for call in completion.tool_calls] for completion in done]
    assert sum(calls == item.expected.value for calls, item in zip(made, items, strict=True)) >= 8
