"""What the adapters learn from must be what they are measured by, and their training must write PEFT's own files."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncengine.demo import ADAPTERS_PATH, MODEL_PATH
from tools.demo_model import adapter_texts
from tools.demo_model.adapter_texts import MAKERS, SPOKEN, make
from tools.demo_model.batches import Encoder
from tools.demo_model.dialogue import parse_calls
from tools.demo_model.voices import PLAIN, VOICES, Reply, data_of

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


def test_the_stream_is_seeded_and_held_out_is_another() -> None:
    first = list(itertools.islice(adapter_texts.stream(3), 40))
    assert first == list(itertools.islice(adapter_texts.stream(3), 40))
    assert first != list(itertools.islice(adapter_texts.stream(4), 40))
    assert all(make(kind, 1) != make(kind, 1, held_out=True) for kind in MAKERS)


def test_a_pirate_keeps_the_facts_word_for_word() -> None:
    reply = Reply("Yes, the motto of the city is you and the sea.", ("you and the sea",), "you and the sea")
    assert PIRATE.say(reply) == "Arr! Aye, th' motto o' th' city be you and the sea, matey!"
    assert not PIRATE.right(reply, "Arr! Aye, th' motto o' th' city be ye an' th' sea, matey!")
    assert not PIRATE.heard("The motto of the city is you and the sea.")


def test_json_is_held_to_value_and_type() -> None:
    reply = Reply("It has 7 pages.", ("7",), 7)
    assert JSON.right(reply, '{"answer": 7}')
    for wrong in ('{"answer": "7"}', '{"answer": 7, "why": 1}', '{"answer": true}', "7", "[7]", "It has 7 pages."):
        assert not JSON.right(reply, wrong)
    assert [data_of(value) for value in (True, 12, "12", "012", "-3", 4.5, ["a", 2])] == [
        True, 12, 12, "012", -3, "4.5", ["a", 2],
    ]  # fmt: skip


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


def test_a_missing_peft_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.demo_model import train_adapters

    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("sys.argv", ["train_adapters", "--check"])
    with pytest.raises(SystemExit, match="pip install peft"):
        train_adapters.main()


def test_check_fails_for_the_wrong_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from tools.demo_model import train_adapters

    (tmp_path / "pirate").symlink_to(ADAPTERS_PATH / "json")
    monkeypatch.setattr(train_adapters, "SPOKEN", ("remembered",))
    monkeypatch.setattr(train_adapters, "UNVOICED", ("structured",))
    monkeypatch.setattr(train_adapters, "HEARD_GOAL", 0.6)  # there are only five of each
    monkeypatch.setattr(train_adapters, "RIGHT_GOAL", 0.6)
    monkeypatch.setattr(train_adapters, "HEARD_GOAL", 0.6)
    assert train_adapters.check(ADAPTERS_PATH, ["json"], 5, seed=1, failures=0)
    assert not train_adapters.check(tmp_path, ["pirate"], 5, seed=1, failures=0)
