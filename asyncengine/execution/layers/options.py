"""The device, dtype and weight forms of a model's layers: the one place where kernels are chosen.

The choice follows from dtype, device, sizes and settings, never from comparing numbers. That each form gives what
the others give is what tests are for."""

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
    parts_of,
)
from asyncengine.kernels.api import compiler_missing

# Layers that are spread over several processes, the stages of one model (pipeline parallelism).
#
# Each stage has a run of layers, one behind the other (GPipe, Huang et al. 2018). The first, which is the engine's own
# process, also has what lies before and behind all layers: embeddings, and the output layer, which are often one
# matrix. Every stage knows the whole model, so that names, forms and sizes are those of one process. Weights of other
# stages are memory that is never written to, and takes none.


class Stage(NamedTuple):
    """One process's part of a model."""

    rank: int
    """0: the engine's own process."""
    size: int
    cuts: tuple[int, ...]
    """[size + 1] layers at which the stages begin, and their number."""

    @property
    def run(self) -> range:
        """The layers that are computed here."""
        return range(self.cuts[self.rank], self.cuts[self.rank + 1])

    def has(self, layer: int | None) -> bool:
        """Whether a layer is computed here; None: what lies before and behind all layers."""
        return self.rank == 0 if layer is None else layer in self.run


def cut_layers(sizes: Sequence[int], outside: int, size: int) -> tuple[int, ...] | None:
    """Layers at which stages begin, and the number of all: as even as may be by what each layer reads, of which the
    first stage has `outside` beside its layers; each has one layer at least. None: there are too few."""
    if len(sizes) < size:
        return None
    ends = [*accumulate(sizes, initial=outside)]
    cuts = [0]
    for stage in range(1, size):
        wanted = ends[-1] * stage / size
        nearest = min(range(len(ends)), key=lambda cut: abs(ends[cut] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - (size - stage)))
    return (*cuts, len(sizes))


# Weights that the engine itself rounds to 8 or 4 bits, on an NVIDIA GPU: by the rule of `kernels.cpu.quantize`.

ENDS = ((0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.05, 0.0), (0.0, 0.05), (0.1, 0.0), (0.0, 0.1))
"""Parts of a group's range by which its ends are drawn in, below and above: the first guesses of its sixteen steps."""
_FORMS = {8: NumberForm(8, 0), 4: NumberForm(4, 32, "minima", scale_dtype="bfloat16")}
_AT_ONCE = 2**24
"""Numbers that are rounded at once: 64 MiB as float32, some of them several times."""


class RoundedWeight(ChunkedWeight):
    """A weight in 8 or 4 bits, rounded on the device while it is read."""

    def __init__(self, outputs: int, inputs: int, bits: int, device: torch.device, release: Release = keep_all) -> None:
        super().__init__(outputs, inputs, StoredForm(f"int{bits}", _FORMS[bits]), device)
        self._release = release

    def takes(self, first: int) -> None:
        return None

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Take rows from `first` on, as `WeightForm.load` does."""
        round_rows = rows_to_int8 if self.matrix.bits == 8 else rows_to_int4
        for begin, part in parts_of(weight, self._release):
            for place in range(0, len(part), step := max(1, _AT_ONCE // self.inputs)):
                rows = part[place : place + step].to(self._device, torch.float32)
                self._put(first + begin + place, **round_rows(rows))
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
        found = nearest(-(low + span * below), span * ((1 - below - beyond) / 15))
        total = found.sum(2, keepdim=True)
        variance = group * found.square().sum(2, keepdim=True) - total.square()
        together = group * (found * above).sum(2, keepdim=True) - total * above.sum(2, keepdim=True)
        scale = torch.where(variance > 0, together / variance, 0.0)
        minimum = (-(low + (above.sum(2, keepdim=True) - scale * total) / group)).bfloat16().float()
        scale = scale.bfloat16().float()
        found = nearest(minimum, scale)
        error = (found * scale - minimum - groups).square_().sum(2, keepdim=True)
        better, least = error < least, torch.minimum(error, least)
        own = {"numbers": found, "scales": scale, "minima": minimum}
        best = {name: torch.where(better, own[name], best[name]) for name in best}
    numbers = best["numbers"].byte().view(len(rows), -1)[:, :inputs]
    return {"numbers": numbers, "scales": best["scales"].squeeze(2), "minima": best["minima"].squeeze(2)}


HEAD_BITS = 8
"""Bits of a quantized output layer, with either setting: it is one matrix, and its errors go straight into the
answer."""
WIDE = (".v_proj", ".down_proj", ".fc2", ".mlp.c_proj")
"""Ends of the names of matrices that have 8 bits where others have 4: values, and what an MLP gives back. A quarter of
the weights, whose errors are most of what 4 bits cost (docs/howto/quantization.md)."""


def bits_of(path: str, bits: int | None) -> int | None:
    """Bits of a matrix of that name, where most have `bits`. Experts' have no more: they are most of a mixture."""
    return HEAD_BITS if bits is not None and path.endswith(WIDE) and "expert" not in path else bits


def rounded_weight(
    outputs: int, inputs: int, bits: int, dtype: torch.dtype, device: torch.device, bounds: Sequence[int] = (),
    release: Release = keep_all, empty: Empty = ordinary, exact: bool = False,
) -> WeightForm:  # fmt: skip
    """Memory for a weight that the engine itself rounds to `bits`. `bounds` as in `LayerOptions.weight`; `exact`: on a
    CPU x is not rounded."""
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
    """Whether inputs of products with quantized weights stay as they are on a CPU. Those of weights that are stored so
    always do in float32: float32 asks for the file's own numbers."""
    release: Callable[[torch.Tensor], object] = keep_all
    """Told of each part of a mapped file that has been read and is not needed again."""
    memory: Arena = field(default_factory=Arena)
    """The memory for weights on a CPU."""
    forms: Mapping[str, StoredForm] = field(default_factory=dict)
    """Forms of matrices that stay as they are stored, by their names in the checkpoint without ".weight". The others,
    and all of them where there are no kernels (`stored_missing`), are kept as if they came in a float type."""
    ranks: Ranks | None = None
    """The processes that hold the model together, of which this is one; None: it is alone."""
    stage: Stage | None = None
    """The layers of which this process has the weights; None: all."""

    def at(self, layer: int | None) -> LayerOptions:
        """The same for a layer, or for what lies outside of all: of another stage's weights nothing is written."""
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
        """Memory for the weight [outputs, inputs] of a linear layer, in the form that is fastest here.

        `bounds`: rows at which one checkpoint matrix ends and the next begins. `paths`: the names of all of them.
        """
        if self.ranks is not None and self._divides(inputs, paths):
            apart = self._keeps(paths) or len({bits_of(path, self.bits) for path in paths}) > 1
            # rows at which ranks cut it follow from the whole: all ranks agree
            cuts = cut_rows(outputs, self.ranks.size, [0, *bounds] if apart else [0])
            if cuts is not None:
                return ShardedWeight(self.ranks, cuts, inputs, bounds, paths, self._kept(paths), self._whole)
        return self._whole(outputs, inputs, bounds, paths)

    def _whole(self, outputs: int, inputs: int, bounds: Sequence[int] = (), paths: Sequence[str] = ()) -> WeightForm:
        return self._stored(paths, outputs, inputs, bounds) or self._plain(outputs, inputs, bounds, paths)

    def _divides(self, inputs: int, paths: Sequence[str]) -> bool:
        """Whether a number that rows of these matrices give follows from its own row alone, or need not."""
        if self.ranks is not None and not self.ranks.exact:
            return True
        kept = self._keeps(paths) and all(path in self.forms for path in paths)
        return self.bits is not None or kept or self._packs(inputs)

    def local_weight(
        self, share: Share, inputs: int, bounds: Sequence[int], paths: Sequence[str]
    ) -> LocalWeight | None:
        """Memory for what this rank's `share` has of a weight; None: some rank's would be in another form than the
        whole. The rest as for `weight`."""
        every = [paths, *(paths_of(spans, bounds, paths) for spans in share.every)]
        if not all(self._divides(inputs, named) for named in every):
            return None
        return LocalWeight(share.spans, inputs, bounds, paths, self._whole)

    def _kept(self, paths: Sequence[str]) -> Mapping[str, StoredForm]:
        return self.forms if self._keeps(paths) else {}

    def _keeps(self, paths: Sequence[str]) -> bool:
        """Whether one of these matrices stays as it is stored, on a CPU."""
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

    def _rounded(self, outputs: int, inputs: int, bounds: Sequence[int], each: Sequence[int]) -> WeightForm:
        """`each`: bits of the matrices; neighbours of as many are one weight."""
        ends = [0, *bounds, outputs] if len(set(each)) > 1 else [0, outputs]
        made = []
        for bits, group in groupby(range(len(ends) - 1), lambda place: each[place] if each else self.bits or 0):
            own = list(group)
            first, last = ends[own[0]], ends[own[-1] + 1]
            within = [bound - first for bound in bounds if first < bound < last]
            made.append(rounded_weight(
                last - first, inputs, bits, self.dtype, self.device, within, self.release, self.memory.empty, self.exact
            ))  # fmt: skip
        return made[0] if len(made) == 1 else SideBySide(made)

    def head_weight(self, outputs: int, inputs: int, path: str = "") -> WeightForm:
        """The same for an output layer, whose logits are float32."""
        bits = None if self.bits is None else HEAD_BITS
        return replace(self, bits=bits).weight(outputs, inputs, (), [path])

    def table(self, path: str, outputs: int, inputs: int) -> WeightForm | None:
        """A table of embeddings that stays as it is stored, or of which each rank has some rows; None: any other."""
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
        """Why some products are torch's, and where they would not be. A kernel of ours sums in an order of its own;
        torch's choose theirs by the number of rows."""
        reason = compiler_missing(self.dtype, self.device)
        if reason is None and self.kernels.name != "compiled":
            reason = "numba cannot be imported"
        elif reason is None:
            from asyncengine.kernels.api import packed as panels

            reason = panels.why_not_packed(self.dtype) or "some matrices have an odd number of inputs"
        return f"{reason}: some products are torch's, whose sums depend on what is computed together"

    def large_zeros(self, *shape: int) -> torch.Tensor:
        """The same as `zeros`, with the other weights on a CPU; for what a checkpoint fills."""
        return self.memory.zeros(shape, self.dtype) if self.device.type == "cpu" else self.zeros(*shape)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory of the model's dtype on its device."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
