"""Encoder configurations: from a config.json to an `EncoderConfig`, by the tables of bidirectional.toml.

Other encoders are refused by name, with the reason: unlike decoders, they cannot run through transformers here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot, dense
from asyncengine.execution.models.decoder import DecoderConfig, LayerConfig
from asyncengine.execution.models.encoder import DISTANCES, EncoderConfig, SequenceHeadConfig
from asyncengine.execution.models.families.tables import decoder_config, decoder_of, read_tables, sections_of, values_of


@dataclass(frozen=True, slots=True)
class Spelling:
    """Earlier tensor names of a family, and how they map to those of current checkpoints."""

    renamed: Sequence[Sequence[str]] = ()
    """Pairs (regular expression, replacement), applied in turn."""
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """{last components of a fused module's name: those of the modules whose rows it holds, in order}."""


_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""Parameter names of norms in checkpoints converted from TensorFlow's BERT."""
_TABLES, _FAMILIES = read_tables("encoders.toml"), read_tables("bidirectional.toml")
SPELLINGS: Mapping[str, Spelling] = {name: Spelling(**each) for name, each in _TABLES["spellings"].items()}
ENCODERS = (*(family for family, table in _FAMILIES.items() if "head" in table or "like" in table), "gemma3_text")
"""model_type of each encoder with a table."""
REFUSED: Mapping[str, str] = _TABLES["refused"]
"""model_type of each encoder that transformers has and this engine has not -> the reason."""
_POOLINGS: Mapping[str, Any] = {"cls": "first", "bos": "first", "mean": "mean", "late": "late"}


def is_encoder_config(config: Any) -> bool:
    """Whether a configuration (transformers' object, or config.json as a mapping) is that of a bidirectional model;
    also true of those in `REFUSED`."""
    names = ("model_type", "use_bidirectional_attention", "is_decoder")
    if isinstance(config, Mapping):
        family, both, decodes = (config.get(name) for name in names)
    else:
        family, both, decodes = (getattr(config, name, None) for name in names)
    if family == "gemma3_text":
        return both is True
    return isinstance(family, str) and (family in ENCODERS or family in REFUSED) and not decodes


def encoder_config_of(config: Any, length: int | None, classifies: bool) -> EncoderConfig:
    """The encoder's configuration. `length`: the longest sequence; None: the model's own. Raises `UnsupportedModel`
    naming the family and the option that its table lacks."""
    family = config.model_type
    if family not in ENCODERS:
        raise UnsupportedModel(f"encoder family {family!r} {REFUSED.get(family, 'is not written down')}")
    form = getattr(config, "position_embedding_type", None) or "absolute"
    if form not in ("absolute", "rope", "rotary"):
        raise UnsupportedModel(f"encoder family {family!r} with position_embedding_type {form!r} is not written down")
    if family == "gemma3_text":
        return _gemma(config, length or config.max_position_embeddings, classifies)
    sections = sections_of(_FAMILIES, config)
    fields, head = (values_of(sections.pop(name, {}), config) for name in ("encoder", "head"))
    if fields.get("distance_bias") and config.relative_attention_num_buckets != DISTANCES:
        raise UnsupportedModel(f"relative_attention_num_buckets is not {DISTANCES}, of which transformers has its code")
    padding = fields.get("padding")
    longest = length or config.max_position_embeddings - (0 if padding is None else padding + 1)
    if not fields.get("num_segments"):
        fields |= {"segments": None, "num_segments": 0}
    headless = sections.pop("headless")
    pooling = _POOLINGS[head.pop("pooling", "cls")]
    stack = decoder_of(config, longest, sections, tied=False)
    first = replace(stack.layers[0], before_attention=None) if "embedding_norm" in fields else stack.layers[0]
    stack = _both_ways(replace(stack, layers=(first, *stack.layers[1:])), () if classifies else tuple(headless))
    classifier = SequenceHeadConfig(config.num_labels, pooling=pooling, **head)
    return EncoderConfig(stack, longest, head=classifier if classifies else None, **fields)


def _gemma(config: Any, length: int, classifies: bool) -> EncoderConfig:
    """EmbeddingGemma (Vera et al. 2025): Gemma 3 with `use_bidirectional_attention`."""
    if classifies:
        raise UnsupportedModel("family 'gemma3_text' with a classifier in both directions is not written down")
    if config.attn_logit_softcapping is not None:
        raise UnsupportedModel("family 'gemma3_text' with attn_logit_softcapping is not written down")
    heads = (r"lm_head\..*", r"dense\..*", r"classifier\..*")
    return EncoderConfig(_both_ways(decoder_config(config, length), heads), length)


def _both_ways(stack: DecoderConfig, ignored: tuple[str, ...]) -> DecoderConfig:
    """The layers without a causal mask. `ignored`: regular expressions of further tensors that are not read."""

    def both(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.attention, AttentionConfig)
        return replace(layer, attention=replace(layer.attention, both=True))

    return replace(stack, layers=tuple(map(both, stack.layers)), ignored=(*stack.ignored, *ignored))


def spelling_of(family: str) -> Spelling:
    """Names that earlier checkpoints of a family may have for its tensors."""
    known = SPELLINGS.get(family, Spelling())
    return Spelling((*_NORMS, *known.renamed), known.split)


def by_stored_name(
    slots: Mapping[str, TensorSlot], stored: Collection[str], spelling: Spelling
) -> dict[str, TensorSlot]:
    """`slots` under the checkpoint's names (`stored`); a slot without a tensor there keeps its own name."""
    unused = dict(slots)
    prefixes = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in slots)]
    by_name: dict[str, TensorSlot] = {}
    for name in stored:
        renamed = name
        for pattern, replacement in spelling.renamed:
            renamed = re.sub(pattern, replacement, renamed)
        spellings = [prefix + end for end in (renamed, renamed.partition(".")[2]) for prefix in prefixes]
        filled = next((filled for spelled in spellings if (filled := _filled(spelled, unused, spelling))), None)
        if filled is not None:
            targets = [unused.pop(slot) for slot in filled]
            by_name[name] = targets[0] if len(targets) == 1 else _joined(targets)
    return by_name | unused


def _filled(name: str, slots: Mapping[str, TensorSlot], spelling: Spelling) -> list[str] | None:
    """Names of the slots that a tensor fills, in the order of its rows; None if one of them does not exist."""
    if name in slots:
        return [name]
    module, _, suffix = name.rpartition(".")
    for end, ends in spelling.split.items():
        if module.endswith("." + end):
            names = [f"{module.removesuffix(end)}{each}.{suffix}" for each in ends]
            return names if all(one in slots for one in names) else None
    return None


def _joined(slots: Sequence[TensorSlot]) -> TensorSlot:
    """One slot that splits the rows of a fused tensor among several slots."""
    firsts = [0, *accumulate(slot.shape[0] for slot in slots)]

    def load(tensor: torch.Tensor | StoredMatrix) -> None:
        rows = tensor if isinstance(tensor, torch.Tensor) else dense(tensor)
        for slot, first in zip(slots, firsts, strict=False):
            slot.load(rows[first : first + slot.shape[0]])

    shape, memory = (firsts[-1], *slots[0].shape[1:]), [tensor for slot in slots for tensor in slot.memory]
    return TensorSlot(shape, load, slots[0].initial, memory=memory if all(slot.memory for slot in slots) else ())
