"""FlashInfer's kernels in whole models, from a fake module: in every layer, a table of angles for each step, equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.forwards import Forwards
from support.wide_models import WIDE, make_wide

from asyncengine.config import EngineConfig
from asyncengine.layers.kernels import FlashInferKernels
from asyncengine.models import loading
from asyncengine.models.decoder import Decoder

LAYERS = 3
IDS = [3, 17, 40, 9, 3, 3, 88]


class Watched(FakeFlashInfer):
    """Remembers the tables it rotated by."""

    def __init__(self) -> None:
        super().__init__(FakeMemory())
        self.tables: list[torch.Tensor] = []

    def apply_rope_with_cos_sin_cache(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.tables.append(arguments[4])
        return super().apply_rope_with_cos_sin_cache(*arguments, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def get(name: str) -> str:
        made: Path = make_wide(name, tmp_path_factory.mktemp("wide") / name)
        return str(made)

    return get


@pytest.mark.parametrize(("name", "norms"), [("llama", 7), ("qwen3", 13), ("qwen2", 7), ("mistral", 7)])
def test_kernels_take_every_part_and_change_no_answer(
    name: str, norms: int, folder: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in WIDE
    config = EngineConfig(device="cpu", show_progress=False)
    plain = loading.load_model(folder(name), config).model
    fake = Watched()
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: FlashInferKernels(fake))
    model = loading.load_model(folder(name), config).model
    assert isinstance(model, Decoder)
    assert model.fused is None
    expected, found = (Forwards(each, backend="torch") for each in (plain, model))
    for ids in (IDS, [5], [6, 7]):
        fake.calls.clear()
        fake.tables.clear()
        logits = expected.step(ids)
        torch.testing.assert_close(found.step(ids), logits, rtol=0.0, atol=1e-5 * float(logits.abs().max()))
        assert fake.calls == {"rmsnorm": norms, "silu": LAYERS, "rope": LAYERS}
        assert len({id(table) for table in fake.tables}) == 1
