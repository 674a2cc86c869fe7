"""Text generators inside other checkpoints: the language model of a multimodal model, or one with a decision head.

Its tensors are found under the prefix that the checkpoint uses, whichever release of transformers wrote it. Those of
towers and projectors are left out, and never read here.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import StoredMatrix
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor

_TABLES = tomllib.loads((resources.files(__package__) / "multimodal.toml").read_text(encoding="utf-8"))
_SPELLINGS: Sequence[tuple[str, str]] = [(base, head) for base, head in _TABLES["spellings"]]
PLACEHOLDERS: Mapping[str, str] = _TABLES["placeholders"]


@dataclass(frozen=True, slots=True)
class TextSource(CheckpointSource):
    """The language model's tensors of a checkpoint, by the names that the decoder has for them."""

    whole: CheckpointSource
    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    names: Mapping[str, str]
    """Tensor name of the decoder -> that of the checkpoint."""
    tensors: Mapping[str, StoredTensor]
    left_out: tuple[str, ...]
    """The checkpoint's other modules, with the number of their tensors: "vision_tower x 437"."""

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        return self.whole.read(self.names[name])

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        self.whole.release(tensor)

    def generation_defaults(self) -> dict[str, Any]:
        return self.whole.generation_defaults()

    def of_vision(self) -> list[str]:
        """Names in the whole checkpoint of the vision tower's tensors: those of neither language model nor audio."""
        taken = set(self.names.values())
        return [name for name in self.whole.tensors if name not in taken and "audio" not in name]


def text_source(whole: CheckpointSource, described: DecoderConfig) -> TextSource:
    """The tensors for the decoder `described`, whose names are those of transformers' current releases.

    A checkpoint without known layers keeps its names, so that loading it reports the first missing tensor.
    """
    base, head = described.layer.removesuffix("layers.{}."), described.head + "."
    spelled = _spelling(whole.tensors) or (base, head)
    names: dict[str, str] = {}
    left_out_counts: Counter[str] = Counter()
    for name in whole.tensors:
        if name.startswith(spelled[0]):
            names[base + name.removeprefix(spelled[0])] = name
        elif name.startswith(spelled[1]):
            names[head + name.removeprefix(spelled[1])] = name
        elif described.mtp is not None and name.startswith("mtp."):
            names[name] = name
        else:
            left_out_counts[name.removeprefix("model.").partition(".")[0]] += 1
    tensors = {name: whole.tensors[stored] for name, stored in names.items()}
    left_out = tuple(f"{module} x {count}" for module, count in sorted(left_out_counts.items()))
    return TextSource(whole, whole.folder, whole.config, whole.files, whole.metadata, names, tensors, left_out)


def language_names(names: Iterable[str]) -> set[str]:
    """The tensor names of a checkpoint that may belong to its language model."""
    known = set(names)
    spelled = _spelling(known)
    return known if spelled is None else {name for name in known if name.startswith(spelled)}


def _spelling(names: Collection[str]) -> tuple[str, str] | None:
    return next((each for each in _SPELLINGS if any(name.startswith(each[0] + "layers.") for name in names)), None)


def placeholders(hf_config: Any) -> dict[int, str]:
    """{token id: its medium ("an image", "a sound")} of the tokens that a multimodal model replaces by features."""
    if hf_config.get_text_config() is hf_config:
        return {}
    named = {getattr(hf_config, field, None): what for field, what in PLACEHOLDERS.items()}
    return {token: what for token, what in named.items() if isinstance(token, int) and not isinstance(token, bool)}


# Decision heads: transformers' `JevForDecision`, a text model whose output layer scores the options of questions.
#
# Such a checkpoint is read as a text generator's with the head as its output layer: the logit of token i is the score
# of the head's row i. Tokens beyond the head's rows are never sampled, as a decision allows only those of its options.

FIELD = "decision_head"
"""Field that is added to the text model's configuration, with the settings of its head."""
_OUTPUT = "lm_head."
_HEAD = {"proj.weight": "lm_head.weight", "weight": "lm_head.weight", "proj.bias": "lm_head.bias"}
"""Tensors of the head (transformers saves its weight under either name) -> tensors of the output layer."""


@dataclass(frozen=True, slots=True)
class DecisionSource(TextSource):
    """A decision model's tensors, by the names that they have in a text generator."""

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """The tensor `name`; those of the head are padded with rows of zeros to the size of the vocabulary."""
        tensor: Any = self.whole.read(self.names[name])
        if not name.startswith(_OUTPUT):
            return tensor
        padded = tensor.new_zeros(self.tensors[name].shape)
        padded[: len(tensor)] = tensor
        return padded


def decision_source(whole: CheckpointSource) -> DecisionSource:
    """The text model of a decision model, with its head as the output layer. Raises `UnsupportedModel` for a variant
    that cannot run, and `ModelNotFound` for a broken config.json."""
    content, text = whole.config, whole.config.get("text_config")
    softcap = content.get("softcap")
    if isinstance(text, Mapping) and "text_config" in text:
        raise UnsupportedModel(f"{whole.folder} has a decision head over a model that reads pictures or sounds")
    if not isinstance(text, Mapping) or not isinstance(text.get("vocab_size"), int):
        raise ModelNotFound(f"{whole.folder / 'config.json'}: text_config must be a model's, with its vocab_size")
    if not isinstance(softcap, (int, float, type(None))) or isinstance(softcap, bool) or softcap == 0:
        raise ModelNotFound(f"{whole.folder / 'config.json'}: softcap must be a number but 0, or null")
    if text.get("is_causal", True) is not True:
        raise UnsupportedModel(
            f"{whole.folder} reads its prompts in both directions (is_causal), which no decoder does"
        )
    if content.get("quantization_config") or text.get("quantization_config"):
        raise UnsupportedModel(f"{whole.folder} is a quantized decision model; these are read unquantized alone")
    tensors, names = {}, {}
    for stored_as, stored in whole.tensors.items():
        is_head, name = stored_as in _HEAD, _HEAD.get(stored_as, stored_as)
        names[name] = stored_as
        if is_head and stored.shape[0] > text["vocab_size"]:
            raise UnsupportedModel(f"{whole.folder} has a head with more rows than its vocabulary has tokens")
        tensors[name] = stored._replace(shape=(text["vocab_size"], *stored.shape[1:])) if is_head else stored
    config = {"dtype": content.get("dtype"), "eos_token_id": None, **text, FIELD: {"softcap": softcap}}
    return DecisionSource(whole, whole.folder, config, whole.files, whole.metadata, names, tensors, ())


def with_head(structure: DecoderConfig | None, content: Mapping[str, Any]) -> DecoderConfig | None:
    """The decoder with the decision head of config.json's `content`, if it has one. Raises `UnsupportedModel` for a
    family that cannot have one here."""
    if (head := content.get(FIELD)) is None:
        return structure
    if structure is None or (structure.layer, structure.head) != ("model.layers.{}.", "lm_head"):
        family = shorten(repr(content.get("model_type")), 80)
        raise UnsupportedModel(f"a decision head over a text model of the family {family} is not written down here")
    return replace(structure, tied=False, head_bias=True, logit_scale=1.0, logit_softcap=head["softcap"])
