"""GGUF models with their image part (mmproj): what they answer is what their original checkpoint does."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.picture_models import chat, expected_logits, picture, words
from support.picture_runs import Loaded, Run

from asyncengine import AsyncEngine, EngineConfig, InvalidParameter, ModelNotFound, SamplingParams, UnsupportedModel
from asyncengine.demo import MODEL_PATH as DEMO_MODEL
from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint
from asyncengine.images import without_identity

from .projector_files import LANGUAGES, write_pair

WANT = 12
WIDE, TALL = picture(1, (40, 24)), picture(2, (16, 48))
CHATS = (
    (chat("look at", WIDE, words(1, 5)), [WIDE]),
    (chat(WIDE, "and", TALL, words(2, 3)), [WIDE, TALL]),
    (chat(words(4, 9)), []),
)


@pytest.fixture(scope="module", params=LANGUAGES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    whole = write_pair(request.param, folder)
    loaded = Loaded(folder / "model.gguf")
    yield SimpleNamespace(name=request.param, folder=folder, whole=whole, loaded=loaded)
    loaded.runner.close()


def test_answers_are_those_of_transformers(pair: Any) -> None:
    for messages, pictures in CHATS:
        spec = pair.loaded.spec(messages, WANT)
        run = Run(pair.loaded)
        (found,) = run.serve([spec])
        assert not run.errors
        ids = without_identity(spec.prompt, spec.images)
        logits = expected_logits(pair.whole, pair.folder / "hf", [*ids, *found[:-1]], pictures)[len(ids) - 1 :]
        assert found == logits.argmax(-1).tolist()
        scores = logits.log_softmax(-1).amax(-1)
        assert float((torch.tensor(run.logprobs[spec.ticket]) - scores).abs().max()) < 3e-4


def opened(folder: Path, **settings: Any) -> Any:
    return open_checkpoint(str(folder / "model.gguf"), CheckpointOptions.of(EngineConfig(**settings)))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_pair("smolvlm", folder)
    return folder


@pytest.fixture
def copied(small: Path, tmp_path: Path) -> Path:
    for file in small.glob("*.gguf"):
        shutil.copy(file, tmp_path)
    return tmp_path


def rewritten(folder: Path, family: str = "smolvlm", **changes: Any) -> str:
    """The error of a pair whose image part was written with `changes`."""
    write_pair(family, folder, **changes)
    with pytest.raises((ModelNotFound, UnsupportedModel)) as error:
        opened(folder, mmproj=folder / "mmproj-model.gguf")
    return str(error.value)


def test_layers_as_early_converters_named_them(tmp_path: Path) -> None:
    def wider(config: Any) -> None:
        config.vision_config.intermediate_size = 64

    whole = write_pair("smolvlm", tmp_path, swapped=True, edit=wider)
    loaded = Loaded(tmp_path / "model.gguf")
    messages, pictures = CHATS[0]
    spec = loaded.spec(messages, 4)
    (found,) = Run(loaded).serve([spec])
    loaded.runner.close()
    ids = without_identity(spec.prompt, spec.images)
    logits = expected_logits(whole, tmp_path / "hf", [*ids, *found[:-1]], pictures)[len(ids) - 1 :]
    assert found == logits.argmax(-1).tolist()


def test_it_is_given_or_found_beside_the_model(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    beside = opened(copied)
    assert [file.name for file in beside.files] == ["model.gguf", "mmproj-model.gguf"]
    (copied / "parts").mkdir()
    moved = shutil.move(copied / "mmproj-model.gguf", copied / "parts" / "any.gguf")
    assert [file.name for file in opened(copied).files] == ["model.gguf"]
    assert [file.name for file in opened(copied, mmproj=moved).files] == ["model.gguf", "any.gguf"]
    assert [file.name for file in opened(copied, mmproj=moved, images="off").files] == ["model.gguf"]
    assert not caplog.records
    for name in ("mmproj-F16.gguf", "mmproj-F32.gguf"):
        shutil.copy(moved, copied / name)
    assert [file.name for file in opened(copied).files] == ["model.gguf"]
    assert "2 image parts lie beside it; pass one as mmproj: mmproj-F16.gguf" in caplog.text


def test_one_of_another_model_is_refused_if_it_was_given(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = copied / "other"
    write_pair("qwen3_vl", other)
    with pytest.raises(ModelNotFound, match=r"image part of another model than model\.gguf, which is llama"):
        opened(copied, mmproj=other / "mmproj-model.gguf")
    shutil.copy(other / "mmproj-model.gguf", copied)
    assert [file.name for file in opened(copied).files] == ["model.gguf"]
    assert "model.gguf reads text alone" in caplog.text


def test_what_cannot_be_one(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is no image part"):
        opened(copied, mmproj=copied / "model.gguf")
    with pytest.raises(ModelNotFound, match="mmproj: no file"):
        opened(copied, mmproj="nowhere.gguf")
    with pytest.raises(InvalidParameter, match="mmproj"):
        EngineConfig(mmproj=" ")
    with pytest.raises(InvalidParameter, match="mmproj: goes with a GGUF model"):
        open_checkpoint(str(DEMO_MODEL), CheckpointOptions(mmproj=str(copied / "mmproj-model.gguf")))
    with pytest.raises(UnsupportedModel, match="pass the file of its language model, and this one as mmproj"):
        open_checkpoint(str(copied / "mmproj-model.gguf"), CheckpointOptions(images=True))


@pytest.mark.parametrize(
    "key", ["preproc_image_size", "image_mean", "image_std", "attention.head_count", "projection_dim"]
)
def test_what_cannot_be_known_is_refused_by_name(key: str, tmp_path: Path) -> None:
    assert f"clip.vision.{key}" in rewritten(tmp_path, without=(f"clip.vision.{key}",))


async def test_through_the_front_door(copied: Path) -> None:
    settings: dict[str, Any] = {"num_threads": 1, "show_progress": False, "dtype": "float32"}
    async with await AsyncEngine.from_pretrained(copied / "model.gguf", **settings) as engine:
        assert engine.info.no_images is None
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        answers = [
            (await engine.chat(chat("look at", shown, "now"), params=params)).token_ids for shown in (WIDE, TALL)
        ]
        assert answers[0] != answers[1]
    (copied / "mmproj-model.gguf").unlink()
    async with await AsyncEngine.from_pretrained(copied / "model.gguf", **settings) as engine:
        assert engine.info.no_images == "the model reads text alone: a GGUF file has pictures in another one (mmproj)"
