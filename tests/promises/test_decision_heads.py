"""Decision heads: the numbers of transformers' `JevForDecision`, the same to the bit in any company, errors by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.demo_gguf import demo_weights
from support.gguf_files import write_gguf
from transformers import AutoConfig, AutoTokenizer, JevConfig, JevForDecision, pipeline
from transformers.decision import DecisionConfig
from transformers.models.jev.configuration_jev import DECIDER_PROMPTS, DECIDER_TEMPLATE, JEV_TEMPLATE

from asyncengine import DEMO_MODEL, AsyncEngine, InvalidParameter, ModelNotFound, UnsupportedModel
from asyncengine.integrations.cli.main import main

from .test_decisions import QUESTIONS, STATES

TINY = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "head_dim": 16,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {},
    "qwen3": {"head_dim": 128},
    "qwen3_5_text": LINEAR,
    "gemma4_text": {"global_head_dim": 16, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
}
"""Text models, with what differs from `TINY`."""
PROMPT = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in DECIDER_PROMPTS["d3"].items())


def decision_model(folder: Path, family: str, template: str = JEV_TEMPLATE, **options: Any) -> Path:
    """A tiny model with planted random weights, as transformers saves it."""
    torch.manual_seed(7)
    text = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    model = JevForDecision(JevConfig(hidden_size=64, text_config=text, **options)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=0.15)
        model.proj.bias.normal_()
    letters = [chr(ord("A") + at) for at in range(16)]
    model.decision_config = DecisionConfig(
        chat_template=template, noul_options=["false", "true"], temperature={"noul": 1.5, "choice": 0.7},
        labels={"noul": ["A", "B"], "score": letters[:6], "choice": letters},
    )  # fmt: skip
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return folder


def engine_of(folder: Path, **settings: Any) -> Any:
    return AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB", **settings)


@pytest.mark.parametrize(
    ("family", "template", "options"),
    [
        ("qwen2", JEV_TEMPLATE, {"softcap": 3.0}),
        ("llama", PROMPT + DECIDER_TEMPLATE, {"offsets": {"noul": 4, "score": 4, "choice": 4}, "num_verbalizers": 20}),
        ("qwen3_5_text", JEV_TEMPLATE, {"softcap": 30.0}),
        ("gemma4_text", JEV_TEMPLATE, {}),
    ],
)
async def test_equals_the_pipeline_of_transformers(
    tmp_path: Path, family: str, template: str, options: dict[str, Any]
) -> None:
    folder = decision_model(tmp_path, family, template, **options)
    oracle = pipeline("decision", model=str(folder), dtype="float32")
    assert isinstance(oracle.model, JevForDecision)
    async with await engine_of(folder) as engine:
        assert engine.info.task == "decide"
        for state in STATES:
            wanted, made = oracle({"state": state, "questions": QUESTIONS}), await engine.decide(state, QUESTIONS)
            for name, answer in made.answers.items():
                theirs = wanted[name].get("probabilities") or {"true": wanted[name]["noul"]}
                assert {key: answer.probabilities[key] for key in theirs} == pytest.approx(theirs, abs=1e-4), name
                assert max(theirs.values()) < 0.999
                assert sum(answer.probabilities.values()) == pytest.approx(1)
        for call in (engine.generate("x"), engine.chat([{"role": "user", "content": "x"}])):
            with pytest.raises(InvalidParameter, match="is a decision model: it serves decide"):
                await call


@pytest.mark.parametrize("settings", [{}, {"prefix_caching": False, "max_num_batched_tokens": 24}])
async def test_same_to_the_bit_in_any_company(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with await engine_of(decision_model(tmp_path, "qwen2", softcap=3.0), **settings) as engine:
        alone = {name: (await engine.decide(STATES[0], {name: each}))[name] for name, each in QUESTIONS.items()}
        turned = dict(reversed(QUESTIONS.items()))
        others = [engine.decide(f"state {number}", QUESTIONS) for number in range(8)]
        made = await asyncio.gather(*(engine.decide(STATES[0], each) for each in (QUESTIONS, turned)), *others)
        assert all(decision.answers == alone for decision in made[:2])
        assert (await engine.decide(STATES[0], QUESTIONS)).answers == alone


async def test_fields_that_are_missing_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    wanted = None
    for missing in ((), ("rms_norm_eps", "head_dim", "eos_token_id")):
        folder = decision_model(tmp_path, "qwen3")
        content = json.loads((folder / "config.json").read_text())
        text = {key: value for key, value in content["text_config"].items() if key not in missing}
        changed(text_config=text)(folder)
        async with await engine_of(folder) as engine:
            made = (await engine.decide(STATES[0], QUESTIONS)).answers
        assert made == (wanted := wanted or made)


async def test_calibrating_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = decision_model(tmp_path, "qwen2")
    before = json.loads((folder / "decision.json").read_text())
    case = {"state": "x", "question": QUESTIONS["tone"], "answer": "calm"}
    (file := tmp_path / "cases.jsonl").write_text("\n".join([json.dumps(case)] * 20))
    assert await asyncio.to_thread(main, ["calibrate", str(folder), "--cases", str(file), "--json"]) == 0
    temperature = json.loads(capsys.readouterr().out)["types"]["choice"]["after"]["temperature"]
    after = json.loads((folder / "decision.json").read_text())
    assert after == {**before, "temperature": {**before["temperature"], "choice": temperature}}
    assert temperature != 0.7
    assert (folder / "decision_template.jinja").read_text() == JEV_TEMPLATE


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, **fields}))

    return change


def in_text(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        changed(text_config={**text, **fields})(folder)

    return change


def with_adapter(folder: Path) -> None:
    content = json.loads((folder / "decision.json").read_text())
    (folder / "decision.json").write_text(json.dumps({**content, "adapter": "lora"}))


def many_marks(folder: Path) -> None:
    (folder / "decision_template.jinja").write_text("{{ state }}<|mark|>{{ question.instructions }}<|mark|>")


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (in_text(is_causal=False), UnsupportedModel, "both directions"),
        (in_text(quantization_config={"quant_method": "awq"}), UnsupportedModel, "unquantized"),
        (in_text(model_type="gpt2"), UnsupportedModel, "family 'gpt2'"),
        (in_text(text_config={}), UnsupportedModel, "pictures"),
        (in_text(vocab_size=20), UnsupportedModel, "more rows than its vocabulary"),
        (in_text(vocab_size="many"), ModelNotFound, "text_config"),
        (changed(softcap=0), ModelNotFound, "softcap"),
        (with_adapter, UnsupportedModel, "LoRA adapter 'lora': merge it"),
        (many_marks, UnsupportedModel, "several positions"),
        (changed(num_verbalizers=9), InvalidParameter, "tone.*more options than the head .* scores: 1 of"),
    ],
)
async def test_what_cannot_run_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None], error: type[Exception], named: str
) -> None:
    change(decision_model(tmp_path, "qwen2"))
    with pytest.raises(error, match=named):
        async with await engine_of(tmp_path) as engine:
            await engine.decide("x", QUESTIONS)


@pytest.mark.parametrize("name", ["head.safetensors", "readout.safetensors"])
async def test_a_head_beside_the_weights_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    for file in DEMO_MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).write_bytes(b"")
    async with await engine_of(tmp_path) as engine:
        with pytest.raises(UnsupportedModel, match=r"beside its weights: .*save_pretrained"):
            await engine.decide("x", QUESTIONS)


async def test_a_gguf_file_with_a_head_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    write_gguf(tmp_path / "model.gguf", config, demo_weights(), more={"llama.decision.type": "jev"})
    with pytest.raises(UnsupportedModel, match=r"decision head \(decision.type\)"):
        await engine_of(tmp_path / "model.gguf")
