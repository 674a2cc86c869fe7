"""Encoders that are written down: from a config.json to an `EncoderConfig`, one short file for each group.

Those that are not are refused by name, with the reason: there is no other way to run one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from itertools import accumulate
from typing import Any

import torch

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot, dense
from asyncengine.execution.models.encoder import EncoderConfig

EncoderConfigOf = Callable[[Any, int | None, bool], EncoderConfig]
"""(transformers' config object, longest sequence or None for the model's own, whether it is a classifier) -> what the
encoder is built of. Raises `UnsupportedModel` for an option that is not written down."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """Names of a family's tensors in earlier files, by what they are called today."""

    renamed: Sequence[Sequence[str]] = ()
    """(regular expression, what takes its place), applied in turn."""
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """{end of a module's name: the ends of those that it is the rows of, in order}."""


_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
"""Names of norms in TensorFlow's BERT."""
_TABLES = tomllib.loads((resources.files(__package__) / "encoders.toml").read_text(encoding="utf-8"))
SPELLINGS: Mapping[str, Spelling] = {name: Spelling(**each) for name, each in _TABLES["spellings"].items()}
ENCODERS: Mapping[str, str] = _TABLES["files"]
"""model_type -> the file in this folder with its `encoder_config`."""
REFUSED: Mapping[str, str] = _TABLES["refused"]
"""Encoders that transformers has and this engine has not, and why."""


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
    """The encoder's configuration. Raises `UnsupportedModel` naming the family and what of it is not written down."""
    family = config.model_type
    file = ENCODERS.get(family)
    if file is None:
        raise UnsupportedModel(f"encoder family {family!r} {REFUSED.get(family, 'is not written down')}")
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind not in ("absolute", "rope", "rotary"):
        raise UnsupportedModel(f"encoder family {family!r} with position_embedding_type {kind!r} is not written down")
    read: EncoderConfigOf = import_module(f"{__package__}.{file}").encoder_config
    return read(config, length, classifies)


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
