"""Folders and files that are no text generator, or whose config.json names what nobody knows: refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.data import cases_of
from support.tiny_models import FAMILIES

from asyncengine import errors
from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.families import NATIVE, known_layer_types
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.refusals import misnamed

CASES = cases_of(__file__)
CONFIG = EngineConfig(device="cpu", show_progress=False)
LETTERS = r"M \(Mamba-2\), \* \(attention\), - \(a feed-forward part\), E \(experts\)"


def content_of(family: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FAMILIES[family]().to_json_string())
    return {field: value for field, value in content.items() if value is not None}


def load(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content))
    load_model(str(folder), CONFIG.replace(load_format="dummy"))


@pytest.mark.parametrize("case", CASES["folders"], ids=lambda case: case["case"])
def test_what_is_in_a_folder(case: dict[str, Any], tmp_path: Path) -> None:
    """Files that are no checkpoint of a text generator; a family's config.json with changes that nothing can run."""
    files = dict(case.get("files", {}))
    if "family" in case:
        kept = {key: value for key, value in content_of(case["family"]).items() if key != case.get("dropped")}
        files["config.json"] = kept | case["changes"]
    if not any(file.endswith(".gguf") for file in files):
        files["model.safetensors"] = "\2\0\0\0\0\0\0\0{}"
    for file, content in files.items():
        (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    config = CONFIG.replace(load_format="dummy" if "family" in case else "auto")
    with pytest.raises(getattr(errors, case["error"]), match=case["says"]):
        load_model(str(tmp_path), config)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite may run with all rights."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ModelNotFound, match=f"the folder {tmp_path} cannot be read: this process has no rights to"):
        load_model(str(tmp_path), CONFIG)


@pytest.mark.parametrize(("family", "field", "wrong", "known"), CASES["layers"])
def test_a_list_of_layers(family: str, field: str, wrong: object, known: str, tmp_path: Path) -> None:
    content = content_of(family)
    content[field] = [wrong, *content.get(field, ["full_attention"] * content.get("num_hidden_layers", 0))[1:]]
    with pytest.raises(UnsupportedModel, match=f" of type {wrong!r}; known are {known}$"):
        load(tmp_path, content)


@pytest.mark.parametrize("pattern", ["MX*-", "X", "m*-M", ["M", "X"], "M" * 40 + "X"])
@pytest.mark.parametrize("field", ["hybrid_override_pattern", "mtp_hybrid_override_pattern"])
def test_a_letter_of_a_pattern(pattern: str, field: str, tmp_path: Path) -> None:
    content = content_of("nemotron-h")
    if field == "hybrid_override_pattern":
        del content["layers_block_type"]
    wrong = next(letter for letter in pattern if letter not in "M*-E")
    with pytest.raises(UnsupportedModel, match=f"layers in {field} of type '{wrong}'; known are {LETTERS}$"):
        load(tmp_path, content | {field: pattern})


def test_a_pattern_of_too_many_letters(tmp_path: Path) -> None:
    content = content_of("nemotron-h") | {"layers_block_type": None, "hybrid_override_pattern": "M" * 5000}
    with pytest.raises(ModelNotFound, match="hybrid_override_pattern must name between 1 and 4096 layers, got 5000"):
        load(tmp_path, {field: value for field, value in content.items() if value is not None})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_has_is_known(family: str) -> None:
    """None of those that load is called unknown, should anything else be wrong with its file."""
    content = content_of(family)
    assert misnamed(content) is None
    assert bool(known_layer_types(content["model_type"])) == (content["model_type"] in NATIVE)
