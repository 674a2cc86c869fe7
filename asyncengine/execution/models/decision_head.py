"""Decision heads: transformers' `JevForDecision`, a text model whose output layer scores the options of questions.

Such a checkpoint is read as that of a text generator with the head in the output layer's place: token i has the score
of the head's row i, and tokens behind its rows are never drawn, as a decision allows those of its options alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.formats import CheckpointSource
from asyncengine.execution.models.multimodal import TextPart

if TYPE_CHECKING:
    import torch

    from asyncengine.execution.layers.stored import StoredMatrix

FIELD = "decision_head"
"""Field of the text model's configuration that has what there is to know of its head."""
_OUTPUT = "lm_head."
_HEAD = {"proj.weight": "lm_head.weight", "weight": "lm_head.weight", "proj.bias": "lm_head.bias"}
"""Tensors of the head (transformers saves its weight under either name), and what they stand in for."""


@dataclass(frozen=True, slots=True)
class DecisionPart(TextPart):
    """A decision model's tensors, by the names that a text generator has for them."""

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor of the whole; of the head, with rows of zeros up to the size of the vocabulary."""
        found: Any = self.whole.read(self.names[name])
        if not name.startswith(_OUTPUT):
            return found
        padded = found.new_zeros(self.tensors[name].shape)
        padded[: len(found)] = found
        return padded


def decision_part(whole: CheckpointSource) -> DecisionPart:
    """The text model of a decision model, with its head as the output layer. Raises `UnsupportedModel` naming what
    cannot run, and `ModelNotFound` for a file that is broken."""
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
    return DecisionPart(whole, whole.folder, config, whole.files, whole.metadata, names, tensors, ())


def with_head(structure: DecoderConfig | None, content: Mapping[str, Any]) -> DecoderConfig | None:
    """The decoder of the model that config.json's `content` describes, with a decision head if it has one. Raises
    `UnsupportedModel` for a family that cannot have one here."""
    if (head := content.get(FIELD)) is None:
        return structure
    if structure is None or (structure.layer, structure.head) != ("model.layers.{}.", "lm_head"):
        family = shorten(repr(content.get("model_type")), 80)
        raise UnsupportedModel(f"a decision head over a text model of the family {family} is not written down here")
    return replace(structure, tied=False, head_bias=True, logit_scale=1.0, logit_softcap=head["softcap"])
