"""Fixtures for tests that run models: tiny checkpoints made once per session, and runners over them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import make_checkpoint

from asyncengine.config import EngineConfig
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner

Checkpoint = Callable[..., Path]
MakeRunner = Callable[..., ModelRunner]


def load_decoder(folder: Path | str, **fields: Any) -> Decoder:
    """The decoder of a checkpoint, loaded with these settings. It must not run through transformers."""
    model = load_model(str(folder), EngineConfig(show_progress=False, **fields)).model
    assert isinstance(model, Decoder)
    return model


def edited(source: Path, target: Path, file: str = "config.json", **changes: Any) -> Path:
    """A copy of a checkpoint with fields of one JSON file changed (made if missing)."""
    shutil.copytree(source, target)
    path = target / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))
    return target


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operators gain nothing from threads, and lose everything when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoint(family, **options of make_checkpoint) -> folder, each made once."""
    made: dict[tuple[Any, ...], Path] = {}

    def get(name: str, **options: Any) -> Path:
        key = (name, *sorted(options.items(), key=str))
        if key not in made:
            made[key] = make_checkpoint(name, tmp_path_factory.mktemp(name) / "model", **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def make_runner(checkpoint: Checkpoint) -> Iterator[MakeRunner]:
    """make_runner(family, **EngineConfig fields) -> a fresh runner with pages of 4 tokens; closed at the end.

    `around`: called with the loaded model; the runner gets what it returns.
    """
    runners: list[ModelRunner] = []

    def make(name: str, around: Callable[[Any], Any] | None = None, **fields: Any) -> ModelRunner:
        config = EngineConfig(**{"page_size": 4, "max_num_seqs": 64, "kv_cache_memory": "24MiB", **fields})
        loaded = load_model(str(checkpoint(name)), config)
        if around is not None:
            loaded.model = around(loaded.model)
        runners.append(build_runner(loaded, config).runner)
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
