"""Models that run through transformers' modules: tried when they are loaded, unfused, and let go of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint
from support.forwards import logits_of
from support.tiny_models import make_model

from asyncengine.config import EngineConfig
from asyncengine.execution.models.fallback.model import TransformersModel
from asyncengine.execution.models.loading import load_model

PLAIN = EngineConfig(fuse=False, show_progress=False)
IDS = list(range(3, 14))


def load(path: Any, **fields: Any) -> TransformersModel:
    model = load_model(str(path), PLAIN.replace(**fields)).model
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-oss", "gemma2"])
def test_logits_are_transformers(name: str, checkpoint: Checkpoint) -> None:
    """Logits of all rows and of some are compared, from the first position on and from a later one."""
    model, oracle = load(checkpoint(name)), make_model(name)
    oracle.set_attn_implementation("eager")
    for first in (0, 300):
        positions = torch.arange(first, first + len(IDS))[None]
        with torch.inference_mode():
            expected = oracle(torch.tensor([IDS]), position_ids=positions, use_cache=False).logits[0]
        most = 1e-5 * float(expected.abs().max())
        for rows in (range(len(IDS)), [0, 10]):
            found = logits_of(model, IDS, rows=rows, shift=first)
            torch.testing.assert_close(found, expected[list(rows)], rtol=0.0, atol=most)


def test_it_lets_go_of_a_backend(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("llama"))
    logits_of(model, IDS)
    assert model.bound is not None
    model.unbind()
    model.unbind()
    assert model.bound is None
    assert not any("asyncengine_attention" in vars(part) for part in model.module.modules())
    assert logits_of(model, IDS).shape == (11, model.vocab_size)
