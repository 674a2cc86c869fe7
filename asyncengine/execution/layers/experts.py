"""Mixtures of experts (Shazeer et al. 2017): each row goes to a few of many feed-forward parts.

All experts' matrices of one kind are one weight, one below the other, wherever its parts can be multiplied alone: a
compiled kernel then reads those of the chosen experts and no others. A row's result is a sum over its experts in the
order in which it chose them, in float32, whatever rows are beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from asyncengine.execution.layers.kernels import ACTIVATIONS
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import gather_experts, held_by, leave
from asyncengine.execution.layers.stored import Layer, RowRange, StoredMatrix, TensorSlot, Weighted, dense
from asyncengine.execution.layers.stored_weight import ChunkedWeight
from asyncengine.execution.layers.weight_forms import DenseWeight, WeightForm
from asyncengine.kernels.api import triton_missing


class ExpertMatrices(Weighted):
    """The matrices [outputs, inputs] of all experts, in one form, one below the other, or in a form for each."""

    def __init__(self, options: LayerOptions, forms: Sequence[WeightForm], experts: int, *, bias: bool) -> None:
        self.experts, self.forms = experts, forms
        self.outputs, self.inputs = forms[0].outputs * len(forms) // experts, forms[0].inputs
        self.bias = options.zeros(experts, self.outputs, dtype=forms[0].bias_dtype) if bias else None

    def load(self, expert: int, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Take rows [first, first + n) of one expert's matrix: weight [n, inputs], as `WeightForm.load` takes it."""
        form, begin = self._place(expert, first)
        form.load(begin, weight)

    def slot(self, expert: int, first: int, outputs: int) -> TensorSlot:
        """The place of those rows of one expert's matrix."""
        form, begin = self._place(expert, first)
        load, shape = partial(self.load, expert, first), (outputs, self.inputs)
        return TensorSlot(shape, load, waits_with=form.waiting, memory=form.tensors(), takes=form.takes(begin))

    def _place(self, expert: int, first: int) -> tuple[WeightForm, int]:
        return (self.forms[0], expert * self.outputs + first) if len(self.forms) == 1 else (self.forms[expert], first)

    def multiply(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias of one expert, by torch or by that expert's own form."""
        bias = None if self.bias is None else self.bias[expert]
        if len(self.forms) > 1:
            return self.forms[expert].multiply(x, bias)
        whole = self.forms[0]
        assert isinstance(whole, DenseWeight)
        first = expert * self.outputs
        return linear(x, whole.weight[first : first + self.outputs], bias)

    def product(self) -> Any:
        """All of them as one product for the compiled kernel; None: it does not take this form."""
        return None if len(self.forms) > 1 else product_of(self.forms[0], self.bias)


def product_of(form: WeightForm, bias: torch.Tensor | None) -> Any:
    """The compiled kernel's record of a matrix; None: there is none, or several matrices side by side."""
    product = getattr(form, "product", None)
    return None if product is None else product(None if bias is None else bias.flatten())


def grouped_weight(options: LayerOptions, form: WeightForm) -> Any:
    """The matrix of all experts as the Triton kernel takes it; None: it does not, or does not run here."""
    if triton_missing(options.device) is not None:
        return None
    if isinstance(form, ChunkedWeight):
        return form.matrix if form.order is None else None
    return form.weight if isinstance(form, DenseWeight) else None


_SCRATCH = 2**26
"""Bytes that a call of the compiled kernel takes at most: a long step is cut into rows that fit."""


class Stacked(NamedTuple):
    """Names of tensors that have the matrices of all experts."""

    up: tuple[str, ...] = ("mlp.experts.gate_up_proj",)
    """Gate and up, [experts, outputs, inputs] each, or both in one."""
    down: str = "mlp.experts.down_proj"


_STACKED = Stacked()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a layer, with the checkpoint's names for their matrices."""

    experts: int
    width: int
    """Numbers between the two products of one expert."""
    activation: str = "silu"
    """The gate's activation, a name in `ACTIVATIONS`; or "clamped", whose gate and up are neighbours (gpt-oss)."""
    up: tuple[str, ...] = ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")
    """Gate and up of each expert."""
    gated: bool = True
    """False: an expert is down(act(up(x))), and `up` has one name (Nemotron 3)."""
    down: str = "mlp.experts.{}.down_proj.weight"
    stacked: Stacked = _STACKED
    """Other names that a checkpoint may have for them (transformers' `save_original_format=False`)."""
    only_stacked: bool = False
    """No checkpoint has a tensor for each expert."""
    transposed: bool = False
    """Stacked tensors are [experts, inputs, outputs] (gpt-oss)."""
    either: bool = False
    """They are so in some checkpoints and not in others, which their shape tells (Qwen 3 VL)."""
    bias: tuple[str, str] | None = None
    """Stacked, of up and down (gpt-oss)."""
    alpha: float = 1.702
    limit: float = 7.0
    """The bound of "clamped": g sigmoid(alpha g) (u + 1), with g at most `limit` and u within -limit .. limit."""

    @property
    def inner(self) -> int:
        """Outputs of an expert's first product."""
        return self.width * (2 if self.gated else 1)


class Experts(Layer):
    """x [rows, width], experts int64 [rows, k] and weights float32 [rows, k] (None: 1) -> [rows, width]."""

    def __init__(self, options: LayerOptions, config: ExpertsConfig, prefix: str, width: int) -> None:
        self.config, self._prefix = config, prefix
        self._gated = options.kernels.gated(config.activation) if config.gated else None
        number = _activation_number(options, config)
        self.ranks = options.ranks if options.ranks is not None and config.experts >= options.ranks.size else None
        """The processes that have some experts each; None: this one has all of them."""
        self._held = held_by(self.ranks, config.experts)
        options = replace(options, ranks=None)  # a rank has whole experts
        up, down = _forms(options, config, prefix, width, self._held, compiled=number is not None)
        count, bias = len(self._held), config.bias is not None
        self.up = ExpertMatrices(options, up, count, bias=bias)
        self.down = ExpertMatrices(options, down, count, bias=bias)
        self.kernel = None
        if number is not None:
            form = replace(config, experts=count)
            self.kernel = _kernel(form, number, self.up.product(), self.down.product(), options.dtype)
        self.compiled = self.kernel is not None
        self._grouped = _grouped(options, config, self.up, self.down, self._gate)
        self.pairs_at_once = 1 << 30
        """Pairs of a row and an expert in one call of the kernel: those for which it has memory."""
        if self.kernel is not None:
            size = options.dtype.itemsize
            self.pairs_at_once = max(1, _SCRATCH // self.kernel.scratch_bytes(1, size))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        if self.ranks is not None or self.kernel is None:
            shares = torch.ones(chosen.shape, device=x.device, dtype=torch.float32) if weights is None else weights
            if self.ranks is not None:
                return gather_experts(self.ranks, self._make, x.contiguous(), chosen - self._held.start, shares)
            return (self._grouped or self.by_torch)(x, chosen, shares)
        x, chosen = x.contiguous(), chosen.contiguous()
        weights = None if weights is None else weights.contiguous()
        out = torch.empty_like(x)
        rows = max(1, self.pairs_at_once // chosen.shape[1])
        for first in range(0, len(x), rows):
            part = slice(first, first + rows)
            self.kernel(x[part], chosen[part], None if weights is None else weights[part], out[part])
        return out

    def _make(self, x: torch.Tensor, experts: torch.Tensor, made: torch.Tensor) -> None:
        """made [pairs, width] = what an expert makes of a row, for pairs whose expert is here: those of the row
        `pair // k` and the expert experts[pair]."""
        count = len(experts) // max(len(x), 1)
        if self.kernel is None:
            self._make_in_turns(x, experts, made)
            return
        (own,) = ((experts >= 0) & (experts < len(self._held))).nonzero(as_tuple=True)
        for some in torch.split(own, self.pairs_at_once) if len(own) else ():
            rows, results = x[some // count], x.new_empty(len(some), x.shape[1])
            self.kernel(rows, experts[some, None].contiguous(), None, results)
            made[some] = results

    def _make_in_turns(self, x: torch.Tensor, experts: torch.Tensor, made: torch.Tensor) -> None:
        """One product after the other for each expert that has rows, whose numbers the host reads."""
        count = len(experts) // max(len(x), 1)
        by_expert, order = experts.sort(stable=True)
        numbers, sizes = torch.unique_consecutive(by_expert, return_counts=True)
        for expert, pairs in zip(numbers.tolist(), torch.split(order, sizes.tolist()), strict=True):
            if 0 <= expert < len(self._held):
                made[pairs] = self.down.multiply(expert, self._gate(self.up.multiply(expert, x[pairs // count])))

    def by_torch(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, count = chosen.shape
        made = x.new_empty((rows * count, x.shape[1]))
        self._make_in_turns(x, chosen.flatten(), made)
        return (made.view(rows, count, x.shape[1]).float() * weights[..., None]).sum(1).to(x.dtype)

    def _gate(self, both: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.activation == "clamped":
            return clamped(both, config.alpha, config.limit)
        if self._gated is not None:
            return self._gated(both)
        if not config.gated:
            return ACTIVATIONS[config.activation](both)
        gate, up = both.chunk(2, dim=-1)
        return ACTIVATIONS[config.activation](gate) * up

    def side_by_side(self) -> list[list[str]]:
        """Checkpoint names, without ".weight", of matrices that are one weight if all of them are stored alike: of all
        experts' gates and ups, of all downs, and in either spelling."""
        config = self.config
        stacked, own = (config.stacked.up, [config.stacked.down]), (config.up, [config.down])
        found = [[name.format(at) for at in range(config.experts) for name in names] for names in own]
        return [[(self._prefix + name).removesuffix(".weight") for name in names] for names in (*stacked, *found)]

    @property
    def name(self) -> str:
        """For `info`."""
        forms = (self.up.forms[0].name, self.down.forms[0].name)
        return f"{' + '.join(dict.fromkeys(forms))} experts"

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Tensors of the checkpoint that it takes, by name: one for each expert, where checkpoints have them so."""
        config = self.config
        if config.only_stacked:
            yield from self.stacked_slots()
            return
        for expert in range(config.experts):
            for part, name in enumerate(config.up):
                yield self._prefix + name.format(expert), self._slot(self.up, expert, part * config.width, config.width)
            yield self._prefix + config.down.format(expert), self._slot(self.down, expert, 0, self.down.outputs)

    def _slot(self, matrices: ExpertMatrices, expert: int, first: int, outputs: int) -> TensorSlot:
        if expert in self._held:
            return matrices.slot(expert - self._held.start, first, outputs)
        return replace(matrices.slot(0, first, outputs), load=leave, waits_with=None)

    def stacked_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """The same by other names: one tensor for the experts together."""
        config = self.config
        names, each = config.stacked, config.inner // len(config.stacked.up)
        replaced = () if config.only_stacked else config.up
        for part, name in enumerate(names.up):
            own = replaced[part * len(replaced) // len(names.up) : (part + 1) * len(replaced) // len(names.up)]
            yield self._prefix + name, self._stacked(self.up, part * each, each, own)
        downs = () if config.only_stacked else (config.down,)
        yield self._prefix + names.down, self._stacked(self.down, 0, self.down.outputs, downs)
        if config.bias is not None:
            for name, matrices in zip(config.bias, (self.up, self.down), strict=True):
                assert matrices.bias is not None
                yield self._prefix + name, self._bias_slot(matrices.bias)

    def _bias_slot(self, bias: torch.Tensor) -> TensorSlot:
        """Slot of all experts' biases, of which this process may have some."""

        def load(every: torch.Tensor | StoredMatrix) -> None:
            bias.copy_((every if isinstance(every, torch.Tensor) else dense(every))[self._held.start : self._held.stop])

        return TensorSlot((self.config.experts, bias.shape[1]), load, 0.0)

    def _stacked(self, matrices: ExpertMatrices, first: int, outputs: int, replaced: tuple[str, ...]) -> TensorSlot:
        config, shape = self.config, (self.config.experts, outputs, matrices.inputs)
        turned_shape = (shape[0], shape[2], shape[1]) if config.either and shape[1] != shape[2] else None

        def load(stacked: torch.Tensor | StoredMatrix) -> None:
            """A tensor of that shape; of a quantized matrix, experts [outputs, inputs] lie one below the other."""
            for place, expert in enumerate(self._held):
                if isinstance(stacked, torch.Tensor):
                    own, turned = stacked[expert], config.transposed or tuple(stacked.shape) == turned_shape
                    matrices.load(place, first, own.T.contiguous() if turned else own)
                else:
                    begin = expert * outputs
                    matrices.load(place, first, RowRange(stacked, begin, begin + outputs))

        names = tuple(self._prefix + name.format(expert) for expert in range(config.experts) for name in replaced)
        if config.transposed:
            shape = (shape[0], shape[2], shape[1])
        one, memory = matrices.slot(0, first, outputs), [tensor for form in matrices.forms for tensor in form.tensors()]
        return replace(one, shape=shape, load=load, other_shape=turned_shape, replaces=names, memory=memory)


def _forms(
    options: LayerOptions, config: ExpertsConfig, prefix: str, width: int, held: range, *, compiled: bool
) -> tuple[Sequence[WeightForm], Sequence[WeightForm]]:
    """Weight forms of (gate and up, down). THE place where it is decided how experts are kept.

    `held`: experts that are here. `compiled`: there is a kernel for parts of a packed or quantized weight. Parts of a
    plain one are views.
    """
    count, inner = len(held), config.width
    shapes = ((config.inner, width), (width, inner))
    paths = _paths(options, config, prefix, held)

    def make(shape: tuple[int, int], names: Sequence[Sequence[str]]) -> WeightForm:
        """Make the weight of the experts whose matrices have these names."""
        outputs, each = shape[0] * len(names), shape[0] // len(names[0])
        return options.weight(outputs, shape[1], range(each, outputs, each), [name for own in names for name in own])

    whole = [make(shape, names) for shape, names in zip(shapes, paths, strict=True)]
    grouped = all(grouped_weight(options, form) is not None for form in whole)
    if grouped or all(isinstance(form, DenseWeight) for form in whole):
        return whole[:1], whole[1:]
    if compiled and all(product_of(form, None) is not None for form in whole):
        from asyncengine.kernels.api import experts as kernels

        if all(outputs % kernels.ALIGNED == 0 for outputs, _ in shapes):
            return whole[:1], whole[1:]
    first, second = (
        [make(shape, names[expert : expert + 1]) for expert in range(count)]
        for shape, names in zip(shapes, paths, strict=True)
    )
    return first, second


def _paths(options: LayerOptions, config: ExpertsConfig, prefix: str, held: range) -> list[list[list[str]]]:
    """Checkpoint names of the matrices of (gate and up, down), a list for each of the experts that are here."""

    def named(names: Sequence[str], expert: int) -> list[str]:
        return [(prefix + name.format(expert)).removesuffix(".weight") for name in names]

    found = []
    for stacked, own in ((config.stacked.up, config.up), ((config.stacked.down,), (config.down,))):
        known = config.only_stacked or any(path in options.forms for path in named(stacked, 0))
        found.append([named(stacked if known else own, expert) for expert in held])
    return found


def _activation_number(options: LayerOptions, config: ExpertsConfig) -> int | None:
    """The compiled kernel's number of the activation; None: it has none like it, or there is no such kernel here."""
    if not options.compiled or options.kernels.name != "compiled":
        return None
    from asyncengine.kernels.api import experts, operations

    if config.activation == "clamped":
        return experts.CLAMPED
    kernels = options.kernels
    return operations.activation_id((kernels.gated if config.gated else kernels.activation)(config.activation))


def _kernel(config: ExpertsConfig, activation: int, up: Any, down: Any, dtype: torch.dtype) -> Any:
    """The compiled kernel; None: experts are kept in forms of their own."""
    if up is None or down is None:
        return None
    from asyncengine.kernels.api import experts

    form = experts.ExpertsForm(config.experts, activation, config.alpha, config.limit)
    return experts.ExpertsKernel(up, down, form, dtype)


def _grouped(options: LayerOptions, config: ExpertsConfig, up: ExpertMatrices, down: ExpertMatrices, gate: Any) -> Any:
    """All experts' products at once, in Triton; None: experts have forms of their own, or it does not run here."""
    found = [grouped_weight(options, each.forms[0]) for each in (up, down) if len(each.forms) == 1]
    if len(found) < 2 or any(weight is None for weight in found):
        return None
    from asyncengine.kernels.api import gpu

    within = config.gated and config.activation == "silu" and config.bias is None
    first, second = gpu.ExpertWeights(found[0], up.bias), gpu.ExpertWeights(found[1], down.bias)
    return partial(gpu.mix, up=first, down=second, activation=None if within else gate, experts=config.experts)


def clamped(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """[..., 2 * width] -> [..., width]: g sigmoid(alpha g) (u + 1) of neighbours g and u, bounded (gpt-oss)."""
    gate, up = both.float()[..., ::2].clamp(max=limit), both.float()[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(both.dtype)
