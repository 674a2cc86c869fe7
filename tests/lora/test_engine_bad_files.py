"""Files that are bad, or go bad behind the engine's back: those who need them hear of it, and nobody else notices."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fake_engine import gather_all
from support.lora_zoo import MAX_RANK, Zoo, random_prompts
from support.peft_checkpoints import CONFIG, WEIGHTS, edit_config

from asyncengine.errors import AdapterError, AdapterNotFound, InvalidParameter

from .lora_engine import ask, assert_given_back, greedy, info_of, load

pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("no_thread_left")

WANT = 8
PROMPT = random_prompts([9, 40])[1]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return Zoo("llama", tmp_path_factory.mktemp("zoo"), 3, everything=False)


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def edit(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / WEIGHTS)
    first = sorted(tensors)[0]
    save_file({**tensors, first: change(tensors[first]).contiguous()}, folder / WEIGHTS)


BROKEN: dict[str, Callable[[Path], object]] = {
    "no folder": shutil.rmtree,
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "cut off": truncate,
    "empty": lambda folder: (folder / WEIGHTS).write_bytes(b""),
    "not a number": lambda folder: edit(folder, lambda weights: weights * torch.nan),
    "wrong shape": lambda folder: edit(folder, lambda weights: weights[:, :-1]),
    "wrong rank": lambda folder: edit_config(folder, r=MAX_RANK + 1),
    "another kind": lambda folder: edit_config(folder, peft_type="IA3"),
    "changed": lambda folder: edit(folder, lambda weights: weights + 1),
}


@pytest.mark.parametrize("fault", BROKEN)
async def test_bad_files_end_those_who_need_them_and_nothing_else(zoo: Zoo, fault: str, tmp_path: Path) -> None:
    """A load fails, and so does reading again an adapter that was dropped from memory, while others run."""
    folder = zoo.copy("a0", tmp_path / "a0")
    adapters = {"a0": folder, "a1": zoo.path("a1"), "a2": zoo.path("a2")}
    settings = {"adapter_memory": "20KB", "adapter_workers": 1, "max_loras": 2, "max_num_seqs": 4}
    async with await load(zoo, adapters=adapters, **settings) as engine:
        assert not info_of(engine, "a0").in_memory
        BROKEN[fault](folder)
        names = ["a0", "a1", None, "a2", "a0", "a1", None]
        calls = gather_all(
            engine.generate(PROMPT, greedy(n=1 + index % 2), adapter=name) for index, name in enumerate(names)
        )
        if fault != "changed":
            before = engine.adapters()
            for name in ("a0", "a1", "new"):
                with pytest.raises(AdapterError):
                    await engine.load_adapter(name, folder)
            for one, other in zip(engine.adapters(), before, strict=True):
                assert (one.name, one.digest, one.path) == (other.name, other.digest, other.path)
        for name, outcome in zip(names, await calls, strict=True):
            if name == "a0":
                assert type(outcome) is AdapterError, outcome
            else:
                assert outcome.token_ids == zoo.answer(name, PROMPT, WANT), name
        await assert_given_back(engine)
        shutil.rmtree(folder, ignore_errors=True)
        zoo.copy("a0", folder)  # what the files were: it can be read again
        assert (await ask(engine, "a0", PROMPT))[0] == zoo.answer("a0", PROMPT, WANT)
        with pytest.raises(AdapterNotFound):
            await ask(engine, "new", PROMPT)


async def test_an_adapter_that_cannot_be_loaded_at_construction_says_so_and_leaves_nothing(
    zoo: Zoo, tmp_path: Path
) -> None:
    folder = zoo.copy("a0", tmp_path / "a0")
    truncate(folder)
    with pytest.raises(AdapterError, match="safetensors"):
        await load(zoo, adapters={"a1": zoo.path("a1"), "a0": folder})


async def test_a_root_that_cannot_be_read_is_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(InvalidParameter, match="adapter_root"):
            await load(zoo, adapter_root=root)


async def test_a_relative_path_means_the_same_folder_for_good(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may go anywhere between the load and the reading again."""
    monkeypatch.chdir(zoo.path("a0").parent)
    adapters, settings = {"a0": "a0", "a1": "a1"}, {"adapter_memory": "16KB", "adapter_workers": 1}
    async with await load(zoo, adapters=adapters, **settings) as engine:
        await engine.load_adapter("again", "a2")
        assert not info_of(engine, "a0").in_memory
        monkeypatch.chdir("/")
        for name, first in (("a0", "a0"), ("a1", "a1"), ("again", "a2")):
            assert (await ask(engine, name, PROMPT))[0] == zoo.answer(first, PROMPT, WANT)
