"""The tensors of an encoder by the names that a checkpoint has for them, today's or earlier ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch

from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.stored import StoredMatrix, dense
from asyncengine.models.families.encoders import Spelling


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
