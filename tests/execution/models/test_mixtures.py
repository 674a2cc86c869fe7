"""Mixtures in whole models: other spellings of checkpoints, rounded weights, adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.checkpoints import Checkpoint, load_decoder
from support.forwards import logits_of
from support.tiny_models import make_model

from asyncengine.errors import AdapterError

IDS = [3, 17, 40, 9, 3, 3, 88, 120, 54, 7, 91]


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2moe", "qwen3moe", "granitemoe", "phimoe", "glm4moe", "ernie4.5moe", "minimax-m2"]
)
def test_both_spellings(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A tensor for each expert, as on the hub, and one for all of them, as transformers has them in memory."""
    make_model(name).save_pretrained(tmp_path / "other", save_original_format=False)
    expected, other = load_decoder(checkpoint(name)), load_decoder(tmp_path / "other")
    assert torch.equal(logits_of(other, IDS), logits_of(expected, IDS))
    assert other.nbytes == expected.nbytes


def test_adapters_of_experts_are_refused_by_name(checkpoint: Checkpoint) -> None:
    """Adapters of attention and of shared experts are not refused."""
    from support.lora_reference import Weights

    from asyncengine.lora.layers.slots import LoraLayers

    model = load_decoder(checkpoint("qwen2moe"))
    lora = LoraLayers(model, 1, 4)
    assert "model.layers.0.mlp.shared_expert.up_proj" in lora.modules
    assert not [path for path in lora.modules if ".experts." in path]
    name = "model.layers.0.mlp.experts.1.up_proj"
    with pytest.raises(AdapterError, match=name):
        lora.write(1, Weights({name: (torch.zeros(4, 48), torch.zeros(32, 4))}))
