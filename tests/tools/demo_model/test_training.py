"""Training optimizes the very function that is served, and that of adapters writes PEFT's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tools.demo_model.export import export
from tools.demo_model.llama import DRAFT, Llama, Shape
from tools.demo_model.voices import VOICES


def randomized(shape: Shape) -> Llama:
    """A model in which no layer is the identity; weights are exact in bfloat16, so export loses nothing."""
    model = Llama(shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.05, generator=generator))
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.mark.parametrize("shape", [Shape(), DRAFT], ids=["demo", "draft"])
def test_logits_equal_transformers(shape: Shape, tmp_path: Path) -> None:
    model = randomized(shape)
    torch.save({"model": model.state_dict()}, tmp_path / "checkpoint.pt")
    export(tmp_path / "checkpoint.pt", tmp_path / "model", shape)
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.randint(3, 2000, (2, 83), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        torch.testing.assert_close(model(ids), served(ids).logits, atol=2e-3, rtol=1e-3)


def test_training_writes_peft_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from tools.demo_model import train_adapters

    model = train_adapters.train(VOICES["pirate"], train_adapters.Options(steps=2, rank=2, alpha=4, batch_tokens=256))
    train_adapters.save(model, tmp_path / "pirate")
    assert {path.name for path in (tmp_path / "pirate").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "pirate" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4, "demo")
    assert config["target_modules"] == sorted(train_adapters.TARGETS)
    assert str(tmp_path) not in json.dumps(config)
    again = train_adapters.with_adapter(tmp_path / "pirate")
    assert isinstance(again.model, peft.PeftModel)
