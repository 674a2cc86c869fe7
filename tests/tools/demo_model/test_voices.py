"""What the adapters learn from must be what they are measured by, and their training must write PEFT's own files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncengine.demo import MODEL_PATH
from tools.demo_model.adapter_texts import SPOKEN, make
from tools.demo_model.batches import Encoder
from tools.demo_model.dialogue import parse_calls
from tools.demo_model.voices import PLAIN, VOICES, Reply

EVERY = (PLAIN, *VOICES.values())
PIRATE, JSON = VOICES["pirate"], VOICES["json"]


@pytest.mark.parametrize("kind", SPOKEN)
def test_every_voice_hears_itself_only_and_keeps_the_facts(kind: str) -> None:
    for seed in range(80):
        reply = make(kind, seed, seed % 2 == 0).last
        for voice in EVERY:
            said = voice.say(reply)
            assert voice.heard(said), said
            assert voice.right(reply, said), (said, reply)
            assert not any(other.heard(said) for other in VOICES.values() if other is not voice)


def test_calls_and_requested_json_are_the_same_in_every_voice() -> None:
    for seed in range(60):
        script = make("same_for_all", seed)
        assert script.spoken(PIRATE) == script.spoken(JSON) == script.spoken(PLAIN)
        assert not any(isinstance(item, Reply) for item in script.messages)


def test_targets_are_the_voice() -> None:
    """The loss falls on what the assistant writes, in the adapter's voice, and on nothing else."""
    from tools.demo_model import train_adapters as train

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    options = train.Options(batch_tokens=512)
    batch = next(train.batches(Encoder(tokenizer), PIRATE, options))
    assert batch.inputs.shape == batch.targets.shape
    learned = [tokenizer.decode(row[row >= 0]) for row in batch.targets]
    for text in learned:
        for answer in text.split("<|im_end|>")[:-1]:
            assert PIRATE.heard(answer) or parse_calls(answer) or answer.startswith(("{", "[")), answer


def test_training_writes_peft_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from tools.demo_model import train_adapters

    model = train_adapters.train(PIRATE, train_adapters.Options(steps=2, rank=2, alpha=4, batch_tokens=256))
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
