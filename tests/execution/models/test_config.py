"""config.json read without transformers says what transformers' classes say, or is left to them."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError
from support import forked
from support.data import cases_of
from support.long import LONG
from support.multimodal_models import CONFIGS
from support.tiny_models import FAMILIES
from transformers import AutoConfig, PreTrainedConfig

from asyncengine.errors import ModelNotFound
from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint
from asyncengine.execution.models.config import MissingField, UnknownLayers
from asyncengine.execution.models.description import read_config
from asyncengine.execution.models.families import MULTIMODAL, NATIVE, decoder_config_of, native_config
from asyncengine.execution.models.multimodal import placeholders

LENGTH = 64


def saved(name: str) -> dict[str, Any]:
    """config.json of a tiny model of the family."""
    content: dict[str, Any] = json.loads(FAMILIES[name]().to_json_string(use_diff=False))
    return content


NAMES = [name for name in FAMILIES if FAMILIES[name]().model_type in NATIVE]
BY_TYPE = {FAMILIES[name]().model_type: name for name in NAMES}


def of_type(family: str) -> dict[str, Any]:
    """config.json of a small model of a family, whether or not there is a checkpoint of it."""
    if family in BY_TYPE:
        return saved(BY_TYPE[family])
    content: dict[str, Any] = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    return content


def theirs_of(content: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' object of a file, and what the family makes of it."""
    theirs = AutoConfig.for_model(**PreTrainedConfig._decode_special_floats(copy.deepcopy(content)))
    return theirs, decoder_config_of(theirs, LENGTH)


def check(content: dict[str, Any]) -> Any:
    """Check that a family makes of a file what it makes of transformers' object of the same file."""
    plain = native_config(copy.deepcopy(content))
    assert plain is not None
    compare(plain, decoder_config_of(plain, LENGTH), *theirs_of(content))
    return plain


def compare(plain: Any, ours: Any, theirs: Any, other: Any) -> None:
    """Two objects of a file, and what the family makes of each."""
    assert dataclasses.asdict(ours) == dataclasses.asdict(other)
    for field in ("eos_token_id", "vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"):
        assert getattr(plain, field, None) == getattr(theirs, field, None), field


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_file(name: str) -> None:
    check(saved(name))


@pytest.mark.parametrize("family", NATIVE)
def test_a_file_without_what_has_a_default(family: str) -> None:
    """A field that is missing has the default of the class, or the file is left to the class."""
    content, optional = {**of_type(family), **BESIDE.get(family, {})}, []
    fields = sorted(content.keys() - {"model_type", "dtype"})
    if not LONG:  # families have most fields in common: every second one, the others of the next family
        fields = fields[list(NATIVE).index(family) % 2 :: 2]
    for field in ("dtype", *fields):
        less = {key: value for key, value in content.items() if key != field}
        try:
            plain = native_config(copy.deepcopy(less))
            ours = plain and decoder_config_of(plain, LENGTH)
            theirs, other = theirs_of(less)
        except (MissingField, ModelNotFound, ValueError, StrictDataclassClassValidationError):
            continue  # the last two: the class refuses what its default makes of the file
        if ours is not None:
            compare(plain, ours, theirs, other)
            optional.append(field)
    assert "dtype" in optional


BESIDE: dict[str, dict[str, Any]] = {
    "falcon": {"hidden_size": 4544}, "falcon_h1": {"mamba_d_ssm": 96}, "glm4v_moe_text": {"head_dim": 128},
}  # fmt: skip
"""Fields without which the class refuses the sizes of the model, or this engine does."""

CASES = cases_of(__file__)
OLDER: list[dict[str, Any]] = CASES["older"]
"""Families, and how files of earlier releases differ from one that is saved now: changed and dropped fields."""


@pytest.mark.parametrize("case", OLDER, ids=str)
def test_a_file_as_earlier_releases_wrote_it(case: dict[str, Any]) -> None:
    """Fields under names and with meanings that the classes translate."""
    kept = {key: value for key, value in saved(case["family"]).items() if key not in case["dropped"]}
    check({**kept, **case["changes"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [*CASES["wrong fields"], ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number, got nan")],
    ids=str,
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        decoder_config_of(native_config({**saved("llama"), "head_dim": None, **changes}), LENGTH)


@pytest.mark.parametrize(("name", "changes", "message"), CASES["options"], ids=str)
def test_an_option_that_nothing_runs_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    """transformers' modules of these families compute attention themselves, or keep states: nothing else could run."""
    with pytest.raises(UnknownLayers, match=message):
        decoder_config_of(native_config({**saved(name), **changes}), LENGTH)


@pytest.mark.parametrize("missing", ["hidden_size", "intermediate_size", "vocab_size"])
def test_a_field_that_only_the_class_has_a_default_for_is_left_to_it(missing: str, tmp_path: Path) -> None:
    content = saved("qwen3")
    del content[missing]
    (tmp_path / "config.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(str(tmp_path), CheckpointOptions(dummy=True))
    hf_config, described, _ = read_config(str(tmp_path), checkpoint)
    assert isinstance(hf_config, PreTrainedConfig)
    assert described is not None


@pytest.mark.parametrize("family", sorted(set(MULTIMODAL) - {"mistral3", "voxtral", "idefics3", "smolvlm"}))
def test_the_language_model_of_several_parts(family: str) -> None:
    content: dict[str, Any] = json.loads(CONFIGS[family]().to_json_string(use_diff=False))
    content["tie_word_embeddings"] = content.get("tie_word_embeddings", False)
    plain = check(content)
    theirs = AutoConfig.for_model(**copy.deepcopy(content))
    assert placeholders(plain) == placeholders(theirs) != {}
    del content["text_config"]["model_type"]
    assert native_config(content) is None


def test_no_class_of_transformers_is_imported(tmp_path: Path) -> None:
    names = ("llama3.1-rope", "qwen3", "gemma4", "ministral3", "granite4", "nemotron-h", "gpt2", "kimi-linear")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(saved(name)))
    probe = (
        "import sys; from asyncengine import EngineConfig; from asyncengine.execution.models.loading import load_model;"
        "config = EngineConfig(device='cpu', load_format='dummy', show_progress=False, attention_backend='torch');"
        "print([load_model(path, config).fused[0] for path in sys.argv[1:]]);"
        "print('transformers' in sys.modules)"
    )
    folders = [str(tmp_path / name) for name in names]
    assert forked.run(probe, *folders).split("\n")[:2] == [str(["decoder x 1"] * len(names)), "False"]
