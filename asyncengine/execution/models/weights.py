"""Loading of named tensors from files into layers, when a model is loaded and when its weights are updated.

Each tensor has a `TensorSlot`, which packs or quantizes it straight from the mapped file, so that a model is never in
memory twice. All names, shapes and dtypes are checked before the first tensor is written: a refused checkpoint leaves a
running model unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import leave
from asyncengine.execution.layers.stored import NumberForm, StoredForm, TensorSlot
from asyncengine.execution.models.decoder import Decoder, DecoderConfig
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor
from asyncengine.execution.models.progress import LoadProgress

FLOATS = ("F32", "BF16", "F16", "F64")
"""dtypes of unquantized tensors that a layer takes."""
_SEED = 0
_SPREAD = 0.02
"""Standard deviation of random weights."""


def assign(
    checkpoint: CheckpointSource, slots: Mapping[str, TensorSlot], ignored: Sequence[str], *, partial: bool = False
) -> dict[str, str]:
    """The slot of each of the checkpoint's tensors that has one, {name in the file: name of the slot}.

    A checkpoint may omit the prefix of all names ("model."), and the output layer's tensor if that is tied to the
    embedding. If `partial`, one tensor suffices, with those that are packed together with it. Raises `ModelNotFound`
    naming the first tensor that is missing, has another shape, is not of a float type, is unknown and not `ignored`, or
    is stored in another form than the model keeps it in.
    """
    assigned: dict[str, str] = {}
    prefixes = sorted({name.split(".")[0] + "." for name in slots})
    for name, stored in checkpoint.tensors.items():
        spellings = (name, *(prefix + name for prefix in prefixes))
        slot = next((known for known in spellings if known in slots), None)
        if slot is None:
            if not any(re.fullmatch(pattern, name) for pattern in ignored) and not _adds_nothing(checkpoint, name):
                raise ModelNotFound(f"{checkpoint.folder} has a tensor that this family does not have: {name}")
            continue
        _check(checkpoint.folder, name, stored, slots[slot])
        _check_form(checkpoint, name, slots[slot].takes)
        assigned[name] = slot
    missing = sorted(slots.keys() - set(assigned.values()))
    if partial and assigned:
        begun = {slots[name].waits_with: name for name in assigned.values() if slots[name].waits_with is not None}
        for name in missing:
            if beside := begun.get(slots[name].waits_with):
                said = f"lacks the tensor {name}, which this model packs together with {beside}: give both"
                raise ModelNotFound(f"{checkpoint.folder} {said}")
    elif missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ModelNotFound(f"{checkpoint.folder} lacks the tensor {missing[0]}{more}")
    return assigned


def _adds_nothing(checkpoint: CheckpointSource, name: str) -> bool:
    """True of a bias of zeros beside a quantized matrix: AutoGPTQ wrote one wherever there is none."""
    matrix = checkpoint.tensors.get(name.removesuffix(".bias") + ".weight")
    if not name.endswith(".bias") or matrix is None or not matrix.quantized:
        return False
    bias = checkpoint.read(name)
    return isinstance(bias, torch.Tensor) and not bool(bias.any())


def settle_tie(described: DecoderConfig, checkpoint: CheckpointSource) -> DecoderConfig:
    """Whether output layer and embedding are one matrix, decided as transformers does.

    A checkpoint that has both, with different numbers, is not tied, whatever its configuration says. Of one with both,
    and with equal numbers, the output layer's is not read.
    """
    head, table = (_stored_name(checkpoint, f"{path}.weight") for path in (described.head, described.embedding))
    if not described.tied or head is None or table is None:
        return described
    left, right = checkpoint.read(head), checkpoint.read(table)
    same = isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left, right)
    for tensor in (left, right):
        checkpoint.release(tensor)
    if same:
        return replace(described, ignored=(*described.ignored, re.escape(head)))
    return replace(described, tied=False)


def slots_of(decoder: Decoder, checkpoint: CheckpointSource) -> dict[str, TensorSlot]:
    """A decoder's slots by the checkpoint's names.

    Of a tied model it may have the one matrix as the output layer's, and of a mixture all experts' in one tensor.
    """
    slots, config = decoder.slots(), decoder.config
    for name, slot in decoder.other_slots():
        if _stored_name(checkpoint, name):
            for replaced in slot.replaces:
                slots.pop(replaced)
            slots[name] = slot
    head, table = (f"{path}.weight" for path in (config.head, config.embedding))
    if config.tied and _stored_name(checkpoint, head) and not _stored_name(checkpoint, table):
        slots[head] = slots.pop(table)
    return slots


def why_no_head(described: DecoderConfig, checkpoint: CheckpointSource) -> str | None:
    """Why the head of a decoder that predicts further tokens cannot be filled from a checkpoint; None: it can."""
    alone = replace(described, layers=described.layers[:1], tied=False)
    decoder = Decoder(alone, LayerOptions(torch.float32, torch.device("meta"), LayerKernels()), 1)
    assert decoder.mtp is not None
    own, slots = decoder.mtp.names(), slots_of(decoder, checkpoint)
    held = {name: _stored_name(checkpoint, name) for name in slots if name in own}
    if not any(held.values()):
        return "the checkpoint has none"
    shapes = {name: checkpoint.tensors[stored].shape for name, stored in held.items() if stored is not None}
    wrong = [name for name in held if shapes.get(name, ...) not in (slots[name].shape, slots[name].other_shape)]
    if not wrong:
        return None
    first = min(wrong)
    what = f"it lacks {first}"
    if first in shapes:
        what = f"its {first} is {list(shapes[first])}, not {list(slots[first].shape)}"
    return f"the checkpoint's is of another form: {what}"


def _stored_name(checkpoint: CheckpointSource, name: str) -> str | None:
    """The checkpoint's name of a tensor, which may lack the prefix of all names; None if it has no such tensor."""
    return next((known for known in (name, name.partition(".")[2]) if known in checkpoint.tensors), None)


def _check(folder: Path, name: str, stored: StoredTensor, slot: TensorSlot) -> None:
    if stored.shape not in (slot.shape, slot.other_shape):
        raise ModelNotFound(
            f"{folder} has a wrong shape for the tensor {name}: {list(stored.shape)}, not {list(slot.shape)}"
        )
    if stored.dtype not in FLOATS and not stored.quantized:
        raise ModelNotFound(f"{folder} has the tensor {name} as {stored.dtype}, not as floating-point numbers")


def _check_form(checkpoint: CheckpointSource, name: str, takes: StoredForm | None) -> None:
    """Refuse an update in another stored form than that of the first load, for which the memory was laid out. Raises
    `ModelNotFound`."""
    if takes is None:
        return
    data = checkpoint.read(name)
    if isinstance(data, torch.Tensor) or not takes.takes(data):
        dtype = checkpoint.tensors[name].dtype
        form = dtype if isinstance(data, torch.Tensor) else f"{dtype} ({_in_words(data.form, data.order is not None)})"
        raise ModelNotFound(
            f"{checkpoint.folder} has the tensor {name} as {form}; this model keeps it as {takes.name} "
            f"({_in_words(takes.numbers, takes.ordered)}): load a new one"
        )


def _in_words(form: NumberForm, ordered: bool) -> str:
    """A description of a number form for error messages: bits, groups, scales, zero points."""
    words = [f"{form.bits} bits", f"groups of {form.group}" if form.group else "a scale for each row"]
    if form.group:
        words += [f"blocks of {form.block}"] if form.block else [f"{form.scale_dtype} scales"]
    words += [] if form.below == "middle" else [f"a {form.below}" if form.below == "table" else form.below]
    return ", ".join([*words, "in an order of its own"] if ordered else words)


def load_weights(
    checkpoint: CheckpointSource, slots: Mapping[str, TensorSlot], names: Mapping[str, str], progress: LoadProgress
) -> None:
    """Fill `slots` from the checkpoint's files. Tensors of other processes (tensor or pipeline parallelism) are not
    read. `names`: the slot of each tensor, as returned by `assign`."""
    names = {name: slot for name, slot in names.items() if slots[slot].load is not leave}
    progress.stage("reading weights", len(names))
    with torch.inference_mode():
        for name in _by_file(checkpoint, names):
            tensor = checkpoint.read(name)
            slots[names[name]].load(tensor)
            checkpoint.release(tensor)
            del tensor
            progress.advance()


def _by_file(checkpoint: CheckpointSource, names: Iterable[str]) -> list[str]:
    """The names sorted by file, so that each file is opened and released once."""
    order = {file: index for index, file in enumerate(checkpoint.files)}
    return sorted(names, key=lambda name: order[checkpoint.tensors[name].file])


def stored_forms(checkpoint: CheckpointSource, names: Mapping[str, str]) -> dict[str, StoredForm]:
    """The stored form of each quantized matrix, by module path. `names`: the slot of each tensor of the checkpoint."""
    forms = {}
    for name in _by_file(checkpoint, (name for name in names if checkpoint.tensors[name].quantized)):
        matrix = checkpoint.read(name)
        if not isinstance(matrix, torch.Tensor):
            path = names[name].removesuffix(".weight")
            forms[path] = StoredForm(matrix.name, matrix.form, matrix.order is not None)
    return forms


def fill_randomly(slots: Mapping[str, TensorSlot], dtype: torch.dtype, device: torch.device) -> None:
    """Fill `slots` with random weights, the same at every call on one device, leaving the process's random state as it
    was: for measuring speed, which does not depend on them (`load_format="dummy"`, as in vLLM).
    """
    generator = torch.Generator(device=device).manual_seed(_SEED)
    with torch.inference_mode():
        for slot in slots.values():
            if slot.initial is not None:
                slot.load(torch.full(slot.shape, slot.initial, dtype=dtype, device=device))
                continue
            tensor = torch.empty(slot.shape, dtype=dtype, device=device).normal_(0.0, _SPREAD, generator=generator)
            slot.load(tensor)
