"""Files that say how to pool, in today's forms, in older ones, and broken: read without torch, refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.data import cases_of

from asyncengine import errors
from asyncengine.errors import UnsupportedModel
from asyncengine.execution.models.pooling_files import read_pooling, transformer_folder
from asyncengine.pooling_spec import PoolingSpec

CASES = cases_of(__file__)
KIND = "sentence_transformers.models."
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
WRITER = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
SCORER = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
THREE = {**SCORER, "id2label": {"2": "c", "0": "a", "1": "b"}}


def folder_with(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*kinds: str, first: str = "") -> dict[str, Any]:
    listed = [{"path": first, "type": KIND + "Transformer"}]
    listed += [{"path": f"{place}_{kind}", "type": KIND + kind} for place, kind in enumerate(kinds, 1)]
    return {"modules.json": listed}


def read(folder: Path, config: Any = BERT, task: str = "auto", pooling: str | None = None, **more: Any) -> PoolingSpec:
    found = read_pooling(folder, config, task, pooling, **more)
    assert found is not None
    return found


def test_who_writes_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, WRITER, "auto", None) is None
    assert read(tmp_path, WRITER, pooling="last").modes == ("lasttoken",)
    assert read(tmp_path, WRITER, "embed", "mean + max").modes == ("mean", "max")
    assert read(tmp_path, WRITER, "rerank").scores_tokens
    assert read(tmp_path, BERT, encoder=True).modes == ("mean",)
    lm = {"model_type": "roberta", "architectures": ["RobertaForCausalLM"]}
    assert read_pooling(tmp_path, lm, "auto", None, encoder=True) is None
    assert read(tmp_path, lm, "embed", encoder=True).whole
    with pytest.raises(UnsupportedModel, match="'middle' is not known; there are cls"):
        read(tmp_path, WRITER, pooling="middle")


@pytest.mark.parametrize(("content", "modes"), CASES["modes"])
def test_pooling_in_both_forms(content: Any, modes: list[str], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {**modules("Pooling"), "1_Pooling/config.json": content})
    assert read(folder).modes == tuple(modes)


def test_all_that_an_embedder_says(tmp_path: Path) -> None:
    files = {
        **modules("Pooling", "Dense", "Dropout", "Normalize", first="0_Transformer"),
        "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False},
        "2_Dense/config.json": {
            "in_features": 8, "out_features": 4, "activation_function": "torch.nn.modules.linear.Identity",
        },
        "config_sentence_transformers.json": {
            "prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query",
        },
        "0_Transformer/sentence_bert_config.json": {"max_seq_length": 77, "do_lower_case": True},
    }  # fmt: skip
    found = read(folder_with(tmp_path, files))
    assert (found.task, found.include_prompt, found.normalize, found.max_length) == ("embed", False, True, 77)
    assert (found.lower_case, dict(found.prompts), found.default_prompt) == (True, {"query": "q: "}, "query")
    assert [(layer.inputs, layer.outputs, layer.activation, layer.bias) for layer in found.dense] == [
        (8, 4, "identity", True)
    ]
    assert found.in_words() == "mean, dense 8 -> 4, normalized"
    assert transformer_folder(tmp_path) == tmp_path / "0_Transformer"


def test_scorers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = read(tmp_path, SCORER)
    assert (one.task, one.modes, one.activation, one.labels) == ("rerank", (), "sigmoid", ("LABEL_0",))
    assert read(tmp_path, SCORER, "classify").activation == "sigmoid"
    three = read(tmp_path, THREE)
    assert (three.task, three.labels, three.activation) == ("classify", ("a", "b", "c"), "softmax")
    several = {**THREE, "problem_type": "multi_label_classification"}
    assert read(tmp_path, several).activation == "sigmoid"
    with pytest.raises(UnsupportedModel, match="classifier of 3 labels"):
        read(tmp_path, THREE, "rerank")
    named = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    assert read(tmp_path, {**SCORER, **named}).activation == "identity"
    old = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert read(tmp_path, {**THREE, **old}).activation == "identity"
    assert read(tmp_path, {**SCORER, "sentence_transformers": "5.0"}).activation == "sigmoid"
    foreign = {"sentence_transformers": {"activation_fn": "os.system"}}
    assert read(tmp_path, {**SCORER, **foreign}).activation == "sigmoid"
    assert "os.system, which is not torch's" in caplog.text
    with pytest.raises(UnsupportedModel, match=r"torch.hub.load"):
        read(tmp_path, {**SCORER, "sentence_transformers": {"activation_fn": "torch.hub.load"}})
    files = {**modules("LogitScore"), "1_LogitScore/config.json": {"true_token_id": 7, "false_token_id": 9}}
    yes = read(folder_with(tmp_path, files), WRITER)
    assert (yes.task, yes.tokens, yes.scores_tokens) == ("rerank", (7, 9), True)


@pytest.mark.parametrize(("about", "files", "kind", "match"), CASES["broken"])
def test_broken_files_are_named(about: str, files: dict[str, Any], kind: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(getattr(errors, kind), match=match):
        read(folder_with(tmp_path, files))
