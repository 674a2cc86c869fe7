"""A loaded model: what it reports, in which dtype, and that its weights come from the checkpoint and nowhere else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from support.checkpoints import Checkpoint, edited
from support.drive import Driver, greedy_reference, prompts
from support.tiny_models import VOCAB, WINDOW, make_model

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.execution.models.checkpoint import open_checkpoint
from asyncengine.execution.models.description import describe_model
from asyncengine.execution.models.loading import LoadedModel, load_model
from asyncengine.execution.runner.building import build_runner

SMALL = EngineConfig(page_size=4, kv_cache_memory="8MiB", max_num_seqs=64)


def output(model: LoadedModel, prompt: list[int], want: int = 12) -> list[int]:
    driver = Driver(build_runner(model, SMALL).runner)
    return driver.run([driver.job(prompt, want)])[0]


def test_what_it_reports(checkpoint: Checkpoint) -> None:
    model = load_model(str(checkpoint("gemma2")), SMALL)
    assert (model.vocab_size, model.input_vocab_size, model.max_model_len) == (VOCAB, VOCAB, 512)
    assert (model.dtype, model.device, model.eos_token_ids) == (torch.float32, torch.device("cpu"), [2])
    assert [spec.window for spec in model.layers] == [WINDOW, None, WINDOW]
    assert {spec.softcap for spec in model.layers} == {5.0}
    assert {spec.scale for spec in model.layers} == {24**-0.5}
    assert [(spec.index, spec.num_heads, spec.num_kv_heads, spec.key_dim) for spec in model.layers] == [
        (index, 4, 2, 16) for index in range(3)
    ]
    reference = make_model("gemma2")
    assert model.weights_bytes == pytest.approx(sum(p.numel() * 4 for p in reference.parameters()), rel=0.1)  # panels
    assert model.name == "model"


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_dtype(dtype: str, expected: torch.dtype, checkpoint: Checkpoint) -> None:
    config = SMALL.replace(dtype=dtype)
    model = load_model(str(checkpoint("qwen3", dtype=torch.bfloat16)), config)
    assert model.dtype == expected
    assert model.model.dtype == expected
    assert model.weights_bytes >= sum(p.numel() for p in make_model("qwen3").parameters()) * expected.itemsize
    assert len(output(model, [3, 4, 5])) == 12


@pytest.mark.parametrize(
    ("generation", "own", "expected"), [(None, 2, [2]), ([5, 7], 2, [5, 7, 2]), (9, [2, 9], [9, 2]), (None, None, [])]
)
def test_end_of_sequence_ids(
    generation: object, own: object, expected: list[int], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = edited(checkpoint("llama"), tmp_path / "a", eos_token_id=own)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "temperature": 0.6}))
    model = load_model(str(folder), SMALL)
    assert model.eos_token_ids == expected
    assert model.generation_defaults["temperature"] == 0.6


def test_max_model_len(checkpoint: Checkpoint) -> None:
    folder = str(checkpoint("llama"))
    assert load_model(folder, SMALL.replace(max_model_len=100)).max_model_len == 100
    with pytest.raises(InvalidParameter, match="must not exceed the model's own 512"):
        load_model(folder, SMALL.replace(max_model_len=513))


@pytest.mark.parametrize("device", ["cuda:99", "abacus", "meta"])
def test_devices_that_are_not_there(device: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(InvalidParameter, match="device"):
        load_model(str(checkpoint("llama")), SMALL.replace(device=device))


def test_the_files_may_go_once_loaded(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Weights are owned, not mapped: overwriting the file must not change the model."""
    prompt = prompts([7], VOCAB)[0]
    for fuse in (True, False):
        folder = tmp_path / str(fuse)
        shutil.copytree(checkpoint("qwen3"), folder)
        model = load_model(str(folder), SMALL.replace(fuse=fuse))
        file = folder / "model.safetensors"
        with file.open("r+b") as stream:
            stream.write(b"\0" * file.stat().st_size)
        assert output(model, prompt) == greedy_reference(make_model("qwen3"), prompt, 12)


def test_a_checkpoint_is_opened_and_described_in_few_files(checkpoint: Checkpoint) -> None:
    """A path is followed from file to file of the package, each return counted: a reader of the code walks the same."""
    folder = str(checkpoint("llama"))
    describe_model(folder, open_checkpoint(folder), SMALL)  # imports what it needs
    stays: list[str] = []

    def step(frame: FrameType | None, event: str, arg: object) -> None:
        here = frame.f_back if frame is not None and event == "return" else frame
        while here is not None and "/asyncengine/execution/models/" not in here.f_code.co_filename:
            here = here.f_back
        if here is not None and event in ("call", "return") and stays[-1:] != [here.f_code.co_filename]:
            stays.append(here.f_code.co_filename)

    sys.setprofile(step)
    try:
        describe_model(folder, open_checkpoint(folder), SMALL)
    finally:
        sys.setprofile(None)
    assert 5 <= len(stays) <= 54, stays
