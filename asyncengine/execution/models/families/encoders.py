"""Encoders that are written down: from a config.json to an `EncoderConfig`, by tables of bidirectional.toml, where they
are described.

Those that are not are refused by name, with the reason: there is no other way to run one.
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
from asyncengine.execution.models.families.tables import decoder_config, decoder_of, parts_of, read_tables, values_of


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names of a family's tensors in earlier files, by what they are called today."""

    renamed: Sequence[Sequence[str]] = ()
    """(regular expression, what takes its place), applied in turn."""
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """{end of a module's name: the ends of those that it is the rows of, in order}."""


_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""Names of norms in TensorFlow's BERT."""
_TABLES, _FAMILIES = read_tables("encoders.toml"), read_tables("bidirectional.toml")
SPELLINGS: Mapping[str, Spelling] = {name: Spelling(**each) for name, each in _TABLES["spellings"].items()}
ENCODERS = (*(family for family, table in _FAMILIES.items() if "head" in table or "like" in table), "gemma3_text")
"""Encoders by model_type that are written down."""
REFUSED: Mapping[str, str] = _TABLES["refused"]
"""Encoders that transformers has and this engine has not, and why."""
_POOLINGS: Mapping[str, Any] = {"cls": "first", "bos": "first", "mean": "mean", "late": "late"}


def is_encoder_config(config: Any) -> bool:
    """Whether a configuration (transformers' object, or config.json as a mapping) is that of a model whose tokens see
    those after them; also of one that is refused."""
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
    naming the family and what of it is not written down."""
    family = config.model_type
    if family not in ENCODERS:
        raise UnsupportedModel(f"encoder family {family!r} {REFUSED.get(family, 'is not written down')}")
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind not in ("absolute", "rope", "rotary"):
        raise UnsupportedModel(f"encoder family {family!r} with position_embedding_type {kind!r} is not written down")
    if family == "gemma3_text":
        return _gemma(config, length or config.max_position_embeddings, classifies)
    parts = parts_of(_FAMILIES, config)
    own, head = (values_of(parts.pop(name, {}), config) for name in ("encoder", "head"))
    if own.get("distance_bias") and config.relative_attention_num_buckets != DISTANCES:
        raise UnsupportedModel(f"relative_attention_num_buckets is not {DISTANCES}, of which transformers has its code")
    padding = own.get("padding")
    longest = length or config.max_position_embeddings - (0 if padding is None else padding + 1)
    if not own.get("num_segments"):
        own |= {"segments": None, "num_segments": 0}
    headless = parts.pop("headless")
    pooling = _POOLINGS[head.pop("pooling", "cls")]
    stack = decoder_of(config, longest, parts, tied=False)
    first = replace(stack.layers[0], before_attention=None) if "embedding_norm" in own else stack.layers[0]
    stack = _both_ways(replace(stack, layers=(first, *stack.layers[1:])), () if classifies else tuple(headless))
    made = SequenceHeadConfig(config.num_labels, pooling=pooling, **head)
    return EncoderConfig(stack, longest, head=made if classifies else None, **own)


def _gemma(config: Any, length: int, classifies: bool) -> EncoderConfig:
    """EmbeddingGemma (Vera et al. 2025): Gemma 3 with `use_bidirectional_attention`."""
    if classifies:
        raise UnsupportedModel("family 'gemma3_text' with a classifier in both directions is not written down")
    if config.attn_logit_softcapping is not None:
        raise UnsupportedModel("family 'gemma3_text' with attn_logit_softcapping is not written down")
    heads = (r"lm_head\..*", r"dense\..*", r"classifier\..*")
    return EncoderConfig(_both_ways(decoder_config(config, length), heads), length)


def _both_ways(stack: DecoderConfig, ignored: tuple[str, ...]) -> DecoderConfig:
    """The stack without a causal mask. `ignored`: further tensors that are not read."""

    def both(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.attention, AttentionConfig)
        return replace(layer, attention=replace(layer.attention, both=True))

    return replace(stack, layers=tuple(map(both, stack.layers)), ignored=(*stack.ignored, *ignored))


def spelling_of(family: str) -> Spelling:
    """Names that earlier files of a family may have for its tensors."""
    known = SPELLINGS.get(family, Spelling())
    return Spelling((*_NORMS, *known.renamed), known.split)


def by_stored_name(
    slots: Mapping[str, TensorSlot], stored: Collection[str], spelling: Spelling
) -> dict[str, TensorSlot]:
    """`slots` by the names in `stored`, where these are spelled otherwise; what is not found keeps its own name."""
    left = dict(slots)
    prefixes = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in slots)]
    found: dict[str, TensorSlot] = {}
    for name in stored:
        today = name
        for pattern, replacement in spelling.renamed:
            today = re.sub(pattern, replacement, today)
        spellings = [prefix + end for end in (today, today.partition(".")[2]) for prefix in prefixes]
        parts = next((parts for each in spellings if (parts := _parts(each, left, spelling))), None)
        if parts is not None:
            own = [left.pop(part) for part in parts]
            found[name] = own[0] if len(own) == 1 else _joined(own)
    return found | left


def _parts(name: str, slots: Mapping[str, TensorSlot], spelling: Spelling) -> list[str] | None:
    """Slots that a tensor fills, in the order of its rows; None: none that is there."""
    if name in slots:
        return [name]
    module, _, kind = name.rpartition(".")
    for end, ends in spelling.split.items():
        if module.endswith("." + end):
            parts = [f"{module.removesuffix(end)}{each}.{kind}" for each in ends]
            return parts if all(part in slots for part in parts) else None
    return None


def _joined(slots: Sequence[TensorSlot]) -> TensorSlot:
    """One slot whose rows are those of several."""
    firsts = [0, *accumulate(slot.shape[0] for slot in slots)]

    def load(tensor: torch.Tensor | StoredMatrix) -> None:
        rows = tensor if isinstance(tensor, torch.Tensor) else dense(tensor)
        for slot, first in zip(slots, firsts, strict=False):
            slot.load(rows[first : first + slot.shape[0]])

    shape, memory = (firsts[-1], *slots[0].shape[1:]), [tensor for slot in slots for tensor in slot.memory]
    return TensorSlot(shape, load, slots[0].initial, memory=memory if all(slot.memory for slot in slots) else ())
