"""Adapters given as tensors: the same as those of the files, and errors that say what is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("peft")

import peft
from support.peft_checkpoints import make_peft
from support.tiny_models import make_checkpoint

from asyncengine import AsyncEngine, Engine, SamplingParams
from asyncengine.errors import AdapterError
from asyncengine.testing import assert_nothing_held

PROMPT = [5, *range(7, 30)]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=True, ignore_eos=True)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def trained(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    base = transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    wrapped = make_peft(base, 1, target_modules=["q_proj", "down_proj"])
    folder = tmp_path_factory.mktemp("adapter") / "one"
    wrapped.save_pretrained(folder)
    return wrapped, folder


def engine_on(base_folder: Path, **settings: Any) -> Any:
    settings = {"kv_cache_memory": "4MB", "num_threads": 1, "show_progress": False, "max_loras": 2, **settings}
    return AsyncEngine.from_pretrained(base_folder, **settings)


async def test_tensors_are_the_adapter_of_their_files(base_folder: Path, trained: tuple[Any, Path]) -> None:
    wrapped, folder = trained
    state = peft.get_peft_model_state_dict(wrapped)
    read = json.loads((folder / "adapter_config.json").read_text())
    async with await engine_on(base_folder) as engine:
        filed = await engine.load_adapter("filed", folder)
        ways = {"object": wrapped.peft_config["default"], "mapping": read}
        for name, config in ways.items():
            given = await engine.load_adapter(name, tensors=state, config=config)
            assert (given.digest, given.rank, given.modules) == (filed.digest, filed.rank, filed.modules)
            assert given.pinned
        base, one, other = [await engine.generate(PROMPT, PARAMS, adapter=name) for name in (None, "filed", "object")]
        assert one.logprobs == other.logprobs != base.logprobs
        # a trainer's next step: the same name means the new content, and those that run end on the old
        running = asyncio.create_task(engine.generate(PROMPT, PARAMS.replace(max_tokens=100), adapter="object"))
        moved = {name: tensor * 1.5 for name, tensor in state.items()}
        again = await engine.load_adapter("object", tensors=moved, config=read)
        assert again.digest != filed.digest
        moved = {name: tensor.zero_() for name, tensor in moved.items()}  # the caller's own once the call has returned
        assert (await engine.generate(PROMPT, PARAMS, adapter="object")).logprobs != one.logprobs
        assert len((await running).token_ids) == 100
        await engine.unload_adapter("object", wait=True)
        assert "object" not in [info.name for info in engine.adapters()]
        assert_nothing_held(engine.core)


async def test_what_is_wrong_is_named(base_folder: Path, trained: tuple[Any, Path]) -> None:
    wrapped, folder = trained
    state = peft.get_peft_model_state_dict(wrapped)
    read, first = json.loads((folder / "adapter_config.json").read_text()), sorted(state)[0]
    infinite = {**state, first: torch.full_like(state[first], float("inf"))}
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("path", {"path": folder, "tensors": state, "config": read}),
        ("path", {}),
        ("config", {"tensors": state}),
        ("tensors", {"config": read}),
        ("config", {"tensors": state, "config": {"r": object()}}),
        ("tensors", {"tensors": [state], "config": read}),
        ("tensors", {"tensors": {}, "config": read}),
        ("tensors", {"tensors": {1: state[first]}, "config": read}),
        (first, {"tensors": {**state, first: state[first].tolist()}, "config": read}),
        (first, {"tensors": {**state, first: state[first].to(torch.int32)}, "config": read}),
        (first, {"tensors": {**state, first: state[first].to("meta")}, "config": read}),
        (first, {"tensors": {**state, first: state[first][:, :-1]}, "config": read}),
        (first, {"tensors": infinite, "config": read}),
    ]
    async with await engine_on(base_folder, hosted=True) as engine:
        for field, arguments in wrong:
            with pytest.raises(AdapterError) as refused:
                await engine.load_adapter("one", **arguments)
            assert refused.value.field == field, arguments
        assert engine.adapters() == ()
        info = await asyncio.to_thread(lambda: Engine(engine).load_adapter("one", tensors=state, config=read))
        assert info.in_memory


async def test_one_that_memory_cannot_hold(base_folder: Path, trained: tuple[Any, Path]) -> None:
    wrapped, _ = trained
    state, config = peft.get_peft_model_state_dict(wrapped), wrapped.peft_config["default"]
    async with await engine_on(base_folder, adapter_memory=1024) as engine:
        with pytest.raises(AdapterError) as refused:
            await engine.load_adapter("one", tensors=state, config=config)
        assert refused.value.field == "adapter_memory"
