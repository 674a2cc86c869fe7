"""The device, dtype and weight forms of a model's layers: the one place where kernels are chosen.

The choice follows from dtype, device, sizes and settings, never from comparing numbers at load time. Tests show that
all forms give the same results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from asyncengine.execution.device.arena import Arena, Empty, ordinary
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.sharded import LocalWeight, Ranks, ShardedWeight, Share, cut_rows, paths_of
from asyncengine.execution.layers.stored import NumberForm, StoredForm, StoredMatrix
from asyncengine.execution.layers.stored_weight import (
    ChunkedWeight,
    SideBySide,
    on_gpu,
    panel_form,
    stored_missing,
    stored_weight,
)
from asyncengine.execution.layers.weight_forms import (
    DenseWeight,
    PackedWeight,
    QuantizedWeight,
    Release,
    WeightForm,
    keep_all,
    row_chunks,
)
from asyncengine.kernels.api import compiler_missing

# Layers that are divided among several processes, the stages of one model (pipeline parallelism).
#
# Each stage has a run of consecutive layers (GPipe, Huang et al. 2018). The first, the engine's own process, also has
# embeddings and the output layer, which are often one matrix. Every stage builds the whole model, so that names, forms
# and sizes are those of one process. Weights of other stages lie in memory that is never written, and so costs nothing.


class Stage(NamedTuple):
    """One pipeline stage of a model."""

    rank: int
    """Number of the stage; 0 is the engine's own process."""
    size: int
    cuts: tuple[int, ...]
    """[size + 1] first layer of each stage, and the number of layers."""

    @property
    def run(self) -> range:
        """The stage's layers."""
        return range(self.cuts[self.rank], self.cuts[self.rank + 1])

    def has(self, layer: int | None) -> bool:
        """Whether the stage computes a layer; None: embeddings and the output layer."""
        return self.rank == 0 if layer is None else layer in self.run


def cut_layers(sizes: Sequence[int], outside: int, size: int) -> tuple[int, ...] | None:
    """[size + 1] first layer of each stage, and the number of layers, as even as possible by the bytes `sizes` that
    layers read; the first stage reads `outside` beside its layers. Each has one layer at least. None: there are too few
    layers."""
    if len(sizes) < size:
        return None
    ends = [*accumulate(sizes, initial=outside)]
    cuts = [0]
    for stage in range(1, size):
        wanted = ends[-1] * stage / size
        nearest = min(range(len(ends)), key=lambda cut: abs(ends[cut] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - (size - stage)))
    return (*cuts, len(sizes))


# Weights that the engine itself rounds to 8 or 4 bits on an NVIDIA GPU, by the rule of `kernels.cpu.quantize`.

ENDS = ((0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.05, 0.0), (0.0, 0.05), (0.1, 0.0), (0.0, 0.1))
"""Shares of a group's range by which it is clipped below and above: initial scales and minima, the best of which is
kept after a least-squares fit."""
_FORMS = {8: NumberForm(8, 0), 4: NumberForm(4, 32, "minima", scale_dtype="bfloat16")}
_AT_ONCE = 2**24
"""Numbers that are rounded at once: 64 MiB as float32, some of them several times."""


class RoundedWeight(ChunkedWeight):
    """A weight that is rounded to 8 or 4 bits on the device while it is loaded."""

    def __init__(self, outputs: int, inputs: int, bits: int, device: torch.device, release: Release = keep_all) -> None:
        super().__init__(outputs, inputs, StoredForm(f"int{bits}", _FORMS[bits]), device)
        self._release = release

    def takes(self, first: int) -> None:
        return None

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Round rows from `first` on, as `WeightForm.load` takes them."""
        round_rows = rows_to_int8 if self.matrix.bits == 8 else rows_to_int4
        for begin, chunk in row_chunks(weight, self._release):
            for offset in range(0, len(chunk), step := max(1, _AT_ONCE // self.inputs)):
                rows = chunk[offset : offset + step].to(self._device, torch.float32)
                self._put(first + begin + offset, **round_rows(rows))
        self._finish()


def rows_to_int8(rows: torch.Tensor) -> dict[str, Any]:
    """Numbers uint8 [n, inputs] with 128 added, and a scale for each row, of float32 [n, inputs]."""
    largest = rows.abs().amax(1)
    factor = torch.where(largest > 1e-30, 127 / largest, 0.0)
    return {"numbers": (rows * factor[:, None]).round_().add_(128).byte(), "row_scales": largest / 127}


def rows_to_int4(rows: torch.Tensor) -> dict[str, Any]:
    """Numbers uint8 [n, inputs], scales and minima [n, groups], of float32 [n, inputs]."""
    inputs, group = rows.shape[1], _FORMS[4].group
    groups = torch.nn.functional.pad(rows, (0, -inputs % group)).view(len(rows), -1, group)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    above, least = groups - low, torch.full_like(low, torch.inf)
    best = {"numbers": torch.zeros_like(groups), "scales": torch.zeros_like(low), "minima": torch.zeros_like(low)}

    def nearest(minimum: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return ((groups + minimum) * torch.where(scale > 1e-30, 1 / scale, 0.0)).round_().clamp_(0, 15)

    for below, beyond in ENDS:
        span = high - low
        numbers = nearest(-(low + span * below), span * ((1 - below - beyond) / 15))
        total = numbers.sum(2, keepdim=True)
        variance = group * numbers.square().sum(2, keepdim=True) - total.square()
        together = group * (numbers * above).sum(2, keepdim=True) - total * above.sum(2, keepdim=True)
        scale = torch.where(variance > 0, together / variance, 0.0)
        minimum = (-(low + (above.sum(2, keepdim=True) - scale * total) / group)).bfloat16().float()
        scale = scale.bfloat16().float()
        numbers = nearest(minimum, scale)
        error = (numbers * scale - minimum - groups).square_().sum(2, keepdim=True)
        better, least = error < least, torch.minimum(error, least)
        own = {"numbers": numbers, "scales": scale, "minima": minimum}
        best = {name: torch.where(better, own[name], best[name]) for name in best}
    numbers = best["numbers"].byte().view(len(rows), -1)[:, :inputs]
    return {"numbers": numbers, "scales": best["scales"].squeeze(2), "minima": best["minima"].squeeze(2)}


HEAD_BITS = 8
"""Bits of a quantized output layer, with either setting: it is one matrix, and its errors affect logits directly."""
WIDE = (".v_proj", ".down_proj", ".fc2", ".mlp.c_proj")
"""Ends of the names of matrices that get 8 bits where others get 4: value projections, and the second product of MLPs.
They are a quarter of the weights, and cause most of the error of 4 bits (docs/howto/quantization.md)."""


def bits_of(path: str, bits: int | None) -> int | None:
    """Bits of the matrix `path`, where most have `bits`. Experts' matrices never get more: they are most of a mixture's
    weights."""
    return HEAD_BITS if bits is not None and path.endswith(WIDE) and "expert" not in path else bits


def rounded_weight(
    outputs: int, inputs: int, bits: int, dtype: torch.dtype, device: torch.device, bounds: Sequence[int] = (),
    release: Release = keep_all, empty: Empty = ordinary, exact: bool = False,
) -> WeightForm:  # fmt: skip
    """An empty weight that the engine itself rounds to `bits`. `bounds` as in `LayerOptions.weight`; `exact`: x is not
    rounded (on a CPU)."""
    if on_gpu(device):
        return RoundedWeight(outputs, inputs, bits, device, release)
    return QuantizedWeight(outputs, inputs, bits, dtype, bounds, release, empty, exact)


@dataclass(frozen=True, slots=True, eq=False)
class LayerOptions:
    """Settings that all layers of one model share."""

    dtype: torch.dtype
    device: torch.device
    kernels: LayerKernels
    bits: int | None = None
    """Bits of the weights of linear layers: 8 or 4; None: those of `dtype`."""
    exact: bool = False
    """Whether inputs of quantized products are not rounded on a CPU. With stored weights and dtype float32 they never
    are: float32 asks for the file's own numbers."""
    release: Callable[[torch.Tensor], object] = keep_all
    """Called with each piece of a mapped file that has been read and is not needed again."""
    memory: Arena = field(default_factory=Arena)
    """The memory for weights on a CPU."""
    forms: Mapping[str, StoredForm] = field(default_factory=dict)
    """Stored forms of quantized matrices, by their names in the checkpoint without ".weight". Other matrices, and all
    of them if there are no kernels (`stored_missing`), are kept as if the checkpoint had floats."""
    ranks: Ranks | None = None
    """The ranks among which weights are divided; None: this process has all of them."""
    stage: Stage | None = None
    """The pipeline stage of this process; None: it has all layers."""

    def at(self, layer: int | None) -> LayerOptions:
        """The options for a layer (None: for embeddings and the output layer). Weights of another stage get an arena of
        their own, which is never written to."""
        return self if self.stage is None or self.stage.has(layer) else replace(self, memory=Arena())

    @property
    def compiled(self) -> bool:
        """Whether there are compiled CPU kernels for this dtype here."""
        return compiler_missing(self.dtype, self.device) is None

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of norms' weights: float32 wherever a kernel or plain torch takes it."""
        return self.kernels.norm_dtype or self.dtype

    def weight(self, outputs: int, inputs: int, bounds: Sequence[int] = (), paths: Sequence[str] = ()) -> WeightForm:
        """An empty weight [outputs, inputs] of a linear layer, in the form that is fastest here.

        `bounds`: rows at which one checkpoint matrix ends and the next begins. `paths`: the names of these matrices.
        """
        if self.ranks is not None and self._divides(inputs, paths):
            apart = self._keeps(paths) or len({bits_of(path, self.bits) for path in paths}) > 1
            # the cuts depend on the whole matrix only, so that all ranks agree on them
            cuts = cut_rows(outputs, self.ranks.size, [0, *bounds] if apart else [0])
            if cuts is not None:
                return ShardedWeight(self.ranks, cuts, inputs, bounds, paths, self._kept(paths), self._whole)
        return self._whole(outputs, inputs, bounds, paths)

    def _whole(self, outputs: int, inputs: int, bounds: Sequence[int] = (), paths: Sequence[str] = ()) -> WeightForm:
        return self._stored(paths, outputs, inputs, bounds) or self._plain(outputs, inputs, bounds, paths)

    def _divides(self, inputs: int, paths: Sequence[str]) -> bool:
        """Whether these matrices may be divided by rows: an output depends on its row only, or need not be exact."""
        if self.ranks is not None and not self.ranks.exact:
            return True
        kept = self._keeps(paths) and all(path in self.forms for path in paths)
        return self.bits is not None or kept or self._packs(inputs)

    def local_weight(
        self, share: Share, inputs: int, bounds: Sequence[int], paths: Sequence[str]
    ) -> LocalWeight | None:
        """An empty weight of the rows in this rank's `share`; None: a rank's rows would get another form than the whole
        matrix, and other bits. The rest as for `weight`."""
        every = [paths, *(paths_of(spans, bounds, paths) for spans in share.every)]
        if not all(self._divides(inputs, named) for named in every):
            return None
        return LocalWeight(share.spans, inputs, bounds, paths, self._whole)

    def _kept(self, paths: Sequence[str]) -> Mapping[str, StoredForm]:
        return self.forms if self._keeps(paths) else {}

    def _keeps(self, paths: Sequence[str]) -> bool:
        """Whether some of these matrices keep their stored form, and all stored ones have a kernel."""
        known = [self.forms[path].numbers for path in paths if path in self.forms]
        missing = bool(known) and stored_missing(self.dtype, self.device) is not None
        return bool(known) and not missing and all(panel_form(each) is not None for each in known)

    def _stored(self, paths: Sequence[str], outputs: int, inputs: int, bounds: Sequence[int] = ()) -> WeightForm | None:
        exact = self.exact or self.dtype == torch.float32
        return stored_weight(
            paths, self.forms, outputs, inputs, bounds, self.dtype, self.device, self._plain, self.memory.empty, exact
        )

    def _plain(self, outputs: int, inputs: int, bounds: Sequence[int] = (), paths: Sequence[str] = ()) -> WeightForm:
        if self.bits is not None:
            return self._rounded(outputs, inputs, bounds, [bits_of(path, self.bits) or self.bits for path in paths])
        if self._packs(inputs):
            return PackedWeight(outputs, inputs, self.dtype, self.release, self.memory.empty)
        return self._dense(outputs, inputs)

    def _rounded(self, outputs: int, inputs: int, bounds: Sequence[int], matrix_bits: Sequence[int]) -> WeightForm:
        """A rounded weight. `matrix_bits`: bits of each matrix; neighbours with equal bits become one weight."""
        ends = [0, *bounds, outputs] if len(set(matrix_bits)) > 1 else [0, outputs]
        forms = []
        for bits, group in groupby(
            range(len(ends) - 1), lambda index: matrix_bits[index] if matrix_bits else self.bits or 0
        ):
            indices = list(group)
            first, last = ends[indices[0]], ends[indices[-1] + 1]
            within = [bound - first for bound in bounds if first < bound < last]
            forms.append(rounded_weight(
                last - first, inputs, bits, self.dtype, self.device, within, self.release, self.memory.empty, self.exact
            ))  # fmt: skip
        return forms[0] if len(forms) == 1 else SideBySide(forms)

    def head_weight(self, outputs: int, inputs: int, path: str = "") -> WeightForm:
        """An empty weight of an output layer, whose logits are float32."""
        bits = None if self.bits is None else HEAD_BITS
        return replace(self, bits=bits).weight(outputs, inputs, (), [path])

    def table(self, path: str, outputs: int, inputs: int) -> WeightForm | None:
        """A table of embeddings in its stored form, or of which each rank has some rows; None: it is a plain tensor."""
        if self.ranks is None:
            return self._stored([path], outputs, inputs)
        if self._keeps([path]):
            return self.weight(outputs, inputs, (), [path])
        cuts = cut_rows(outputs, self.ranks.size, [0])
        return None if cuts is None else ShardedWeight(self.ranks, cuts, inputs, (), (), {}, self._dense)

    def _dense(self, outputs: int, inputs: int, bounds: Sequence[int] = (), paths: Sequence[str] = ()) -> WeightForm:
        return DenseWeight(outputs, inputs, self.dtype, self.device, self.release, self.memory.empty)

    def _packs(self, inputs: int) -> bool:
        if not self.compiled:
            return False
        from asyncengine.kernels.api import packed as panels

        return panels.packing_pays(self.dtype) and panels.packing_fits(self.dtype, inputs)

    def why_torch(self) -> str:
        """Why some products are torch's, in words. Our kernels sum in a fixed order; torch's choose theirs by the
        number of rows, so that results depend on the batch."""
        reason = compiler_missing(self.dtype, self.device)
        if reason is None and self.kernels.name != "compiled":
            reason = "numba cannot be imported"
        elif reason is None:
            from asyncengine.kernels.api import packed as panels

            reason = panels.why_not_packed(self.dtype) or "some matrices have an odd number of inputs"
        return f"{reason}: some products are torch's, whose sums depend on what is computed together"

    def large_zeros(self, *shape: int) -> torch.Tensor:
        """Zeros of the model's dtype, on a CPU in the weights' arena; for tensors that a checkpoint fills."""
        return self.memory.zeros(shape, self.dtype) if self.device.type == "cpu" else self.zeros(*shape)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Zeros of a dtype, the model's by default, on its device."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
