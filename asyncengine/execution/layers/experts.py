"""Mixtures of experts (Shazeer et al. 2017): each row goes to a few of many feed-forward networks.

The same matrices of all experts are stacked to one weight wherever a kernel can multiply by some of its rows: it then
reads the chosen experts' matrices only. A row's result is a sum over its experts in the order in which it chose them,
in float32, independent of the rows beside it.
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
from asyncengine.execution.layers.sharded import gather_experts, leave, local_range
from asyncengine.execution.layers.stored import Layer, RowRange, StoredMatrix, TensorSlot, Weighted, dense
from asyncengine.execution.layers.stored_weight import ChunkedWeight
from asyncengine.execution.layers.weight_forms import DenseWeight, WeightForm
from asyncengine.kernels.api import triton_missing


class ExpertMatrices(Weighted):
    """The matrices [outputs, inputs] of all experts: stacked in one weight form, or in one form for each expert."""

    def __init__(self, options: LayerOptions, forms: Sequence[WeightForm], experts: int, *, bias: bool) -> None:
        self.experts, self.forms = experts, forms
        self.outputs, self.inputs = forms[0].outputs * len(forms) // experts, forms[0].inputs
        self.bias = options.zeros(experts, self.outputs, dtype=forms[0].bias_dtype) if bias else None

    def load(self, expert: int, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Take rows [first, first + n) of one expert's matrix: weight [n, inputs], as `WeightForm.load` takes it."""
        form, begin = self._locate(expert, first)
        form.load(begin, weight)

    def slot(self, expert: int, first: int, outputs: int) -> TensorSlot:
        """The slot of rows [first, first + outputs) of one expert's matrix."""
        form, begin = self._locate(expert, first)
        load, shape = partial(self.load, expert, first), (outputs, self.inputs)
        return TensorSlot(shape, load, waits_with=form.waiting, memory=form.tensors(), takes=form.takes(begin))

    def _locate(self, expert: int, first: int) -> tuple[WeightForm, int]:
        return (self.forms[0], expert * self.outputs + first) if len(self.forms) == 1 else (self.forms[expert], first)

    def multiply(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x W^T + bias of one expert, by torch or by the expert's weight form."""
        bias = None if self.bias is None else self.bias[expert]
        if len(self.forms) > 1:
            return self.forms[expert].multiply(x, bias)
        whole = self.forms[0]
        assert isinstance(whole, DenseWeight)
        first = expert * self.outputs
        return linear(x, whole.weight[first : first + self.outputs], bias)

    def product(self) -> Any:
        """All experts' matrices as one product for the compiled kernel; None: it does not take this form."""
        return None if len(self.forms) > 1 else product_of(self.forms[0], self.bias)


def product_of(form: WeightForm, bias: torch.Tensor | None) -> Any:
    """The compiled kernel's record of a matrix; None: there is none, or several matrices side by side."""
    product = getattr(form, "product", None)
    return None if product is None else product(None if bias is None else bias.flatten())


def grouped_weight(options: LayerOptions, form: WeightForm) -> Any:
    """The stacked matrices as the Triton kernel takes them; None: it does not take this form, or does not run here."""
    if triton_missing(options.device) is not None:
        return None
    if isinstance(form, ChunkedWeight):
        return form.matrix if form.order is None else None
    return form.weight if isinstance(form, DenseWeight) else None


_SCRATCH = 2**26
"""Most bytes of working memory of a call of the compiled kernel; long steps are cut into chunks of rows that fit."""


class Stacked(NamedTuple):
    """Checkpoint names of tensors that hold the matrices of all experts."""

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
    """Names of stacked tensors that a checkpoint may have instead (transformers' `save_original_format=False`)."""
    only_stacked: bool = False
    """No checkpoint has a tensor for each expert."""
    transposed: bool = False
    """Stacked tensors are [experts, inputs, outputs] (gpt-oss)."""
    either: bool = False
    """Stacked tensors are transposed in some checkpoints, which is seen by their shape (Qwen 3 VL)."""
    bias: tuple[str, str] | None = None
    """Names of the stacked biases of up and down (gpt-oss)."""
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
        """The ranks among which experts are divided; None: this process has all of them."""
        self._local = local_range(self.ranks, config.experts)
        options = replace(options, ranks=None)  # a rank has whole experts
        up, down = _forms(options, config, prefix, width, self._local, compiled=number is not None)
        count, bias = len(self._local), config.bias is not None
        self.up = ExpertMatrices(options, up, count, bias=bias)
        self.down = ExpertMatrices(options, down, count, bias=bias)
        self.kernel = None
        if number is not None:
            form = replace(config, experts=count)
            self.kernel = _kernel(form, number, self.up.product(), self.down.product(), options.dtype)
        self.compiled = self.kernel is not None
        self._grouped = _grouped(options, config, self.up, self.down, self._gate)
        self.pairs_at_once = 1 << 30
        """Most (row, expert) pairs in one call of the kernel, by its working memory."""
        if self.kernel is not None:
            size = options.dtype.itemsize
            self.pairs_at_once = max(1, _SCRATCH // self.kernel.scratch_bytes(1, size))

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        if self.ranks is not None or self.kernel is None:
            shares = torch.ones(chosen.shape, device=x.device, dtype=torch.float32) if weights is None else weights
            if self.ranks is not None:
                return gather_experts(self.ranks, self._make, x.contiguous(), chosen - self._local.start, shares)
            return (self._grouped or self.by_torch)(x, chosen, shares)
        x, chosen = x.contiguous(), chosen.contiguous()
        weights = None if weights is None else weights.contiguous()
        out = torch.empty_like(x)
        rows = max(1, self.pairs_at_once // chosen.shape[1])
        for first in range(0, len(x), rows):
            chunk = slice(first, first + rows)
            self.kernel(x[chunk], chosen[chunk], None if weights is None else weights[chunk], out[chunk])
        return out

    def _make(self, x: torch.Tensor, experts: torch.Tensor, made: torch.Tensor) -> None:
        """Write the experts' outputs to made [pairs, width]. Pair p is of row p // k and expert experts[p]; pairs whose
        expert is on another rank are left out."""
        count = len(experts) // max(len(x), 1)
        if self.kernel is None:
            self._make_in_turns(x, experts, made)
            return
        (local,) = ((experts >= 0) & (experts < len(self._local))).nonzero(as_tuple=True)
        for pairs in torch.split(local, self.pairs_at_once) if len(local) else ():
            rows, results = x[pairs // count], x.new_empty(len(pairs), x.shape[1])
            self.kernel(rows, experts[pairs, None].contiguous(), None, results)
            made[pairs] = results

    def _make_in_turns(self, x: torch.Tensor, experts: torch.Tensor, out: torch.Tensor) -> None:
        """Compute expert by expert. The host reads which experts have rows, so it waits for a GPU."""
        count = len(experts) // max(len(x), 1)
        by_expert, order = experts.sort(stable=True)
        numbers, sizes = torch.unique_consecutive(by_expert, return_counts=True)
        for expert, pairs in zip(numbers.tolist(), torch.split(order, sizes.tolist()), strict=True):
            if 0 <= expert < len(self._local):
                out[pairs] = self.down.multiply(expert, self._gate(self.up.multiply(expert, x[pairs // count])))

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
        """Groups of checkpoint names, without ".weight", of matrices that are stacked if all of a group are stored
        alike: all experts' gates and ups, and all downs, by their stacked names and by each expert's."""
        config = self.config
        stacked, separate = (config.stacked.up, [config.stacked.down]), (config.up, [config.down])
        by_expert = [[name.format(expert) for expert in range(config.experts) for name in names] for names in separate]
        return [[(self._prefix + name).removesuffix(".weight") for name in names] for names in (*stacked, *by_expert)]

    @property
    def name(self) -> str:
        """Name of the form, for `info`."""
        forms = (self.up.forms[0].name, self.down.forms[0].name)
        return f"{' + '.join(dict.fromkeys(forms))} experts"

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Slots by checkpoint name: for each expert's tensors, unless all checkpoints have stacked ones."""
        config = self.config
        if config.only_stacked:
            yield from self.stacked_slots()
            return
        for expert in range(config.experts):
            for index, name in enumerate(config.up):
                slot = self._slot(self.up, expert, index * config.width, config.width)
                yield self._prefix + name.format(expert), slot
            yield self._prefix + config.down.format(expert), self._slot(self.down, expert, 0, self.down.outputs)

    def _slot(self, matrices: ExpertMatrices, expert: int, first: int, outputs: int) -> TensorSlot:
        if expert in self._local:
            return matrices.slot(expert - self._local.start, first, outputs)
        return replace(matrices.slot(0, first, outputs), load=leave, waits_with=None)

    def stacked_slots(self) -> Iterator[tuple[str, TensorSlot]]:
        """Slots of tensors that hold all experts' matrices."""
        config = self.config
        names, rows = config.stacked, config.inner // len(config.stacked.up)
        replaced = () if config.only_stacked else config.up
        for index, name in enumerate(names.up):
            old = replaced[index * len(replaced) // len(names.up) :][: len(replaced) // len(names.up)]
            yield self._prefix + name, self._stacked(self.up, index * rows, rows, old)
        downs = () if config.only_stacked else (config.down,)
        yield self._prefix + names.down, self._stacked(self.down, 0, self.down.outputs, downs)
        if config.bias is not None:
            for name, matrices in zip(config.bias, (self.up, self.down), strict=True):
                assert matrices.bias is not None
                yield self._prefix + name, self._bias_slot(matrices.bias)

    def _bias_slot(self, bias: torch.Tensor) -> TensorSlot:
        """Slot of the tensor of all experts' biases, of which this rank may need some."""

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            biases = tensor if isinstance(tensor, torch.Tensor) else dense(tensor)
            bias.copy_(biases[self._local.start : self._local.stop])

        return TensorSlot((self.config.experts, bias.shape[1]), load, 0.0)

    def _stacked(self, matrices: ExpertMatrices, first: int, outputs: int, replaced: tuple[str, ...]) -> TensorSlot:
        config, shape = self.config, (self.config.experts, outputs, matrices.inputs)
        turned_shape = (shape[0], shape[2], shape[1]) if config.either and shape[1] != shape[2] else None

        def load(stacked: torch.Tensor | StoredMatrix) -> None:
            """Take a tensor of that shape, or a quantized matrix in which experts' rows follow each other."""
            for index, expert in enumerate(self._local):
                if isinstance(stacked, torch.Tensor):
                    matrix, turned = stacked[expert], config.transposed or tuple(stacked.shape) == turned_shape
                    matrices.load(index, first, matrix.T.contiguous() if turned else matrix)
                else:
                    begin = expert * outputs
                    matrices.load(index, first, RowRange(stacked, begin, begin + outputs))

        names = tuple(self._prefix + name.format(expert) for expert in range(config.experts) for name in replaced)
        if config.transposed:
            shape = (shape[0], shape[2], shape[1])
        one, memory = matrices.slot(0, first, outputs), [tensor for form in matrices.forms for tensor in form.tensors()]
        return replace(one, shape=shape, load=load, other_shape=turned_shape, replaces=names, memory=memory)


def _forms(
    options: LayerOptions, config: ExpertsConfig, prefix: str, width: int, local: range, *, compiled: bool
) -> tuple[Sequence[WeightForm], Sequence[WeightForm]]:
    """Weight forms of (gate and up, down). THE place where it is decided how experts are kept.

    `local`: experts that are here. `compiled`: there is a kernel for parts of a packed or quantized weight. Parts of a
    plain one are views.
    """
    count, inner = len(local), config.width
    shapes = ((config.inner, width), (width, inner))
    paths = _paths(options, config, prefix, local)

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


def _paths(options: LayerOptions, config: ExpertsConfig, prefix: str, local: range) -> list[list[list[str]]]:
    """Checkpoint names of the matrices of (gate and up, down), a list for each of this rank's experts."""

    def named(names: Sequence[str], expert: int) -> list[str]:
        return [(prefix + name.format(expert)).removesuffix(".weight") for name in names]

    paths = []
    for stacked, separate in ((config.stacked.up, config.up), ((config.stacked.down,), (config.down,))):
        is_stacked = config.only_stacked or any(path in options.forms for path in named(stacked, 0))
        paths.append([named(stacked if is_stacked else separate, expert) for expert in local])
    return paths


def _activation_number(options: LayerOptions, config: ExpertsConfig) -> int | None:
    """The compiled kernel's number of the activation; None: it does not have it, or does not run here."""
    if not options.compiled or options.kernels.name != "compiled":
        return None
    from asyncengine.kernels.api import experts, operations

    if config.activation == "clamped":
        return experts.CLAMPED
    kernels = options.kernels
    return operations.activation_id((kernels.gated if config.gated else kernels.activation)(config.activation))


def _kernel(config: ExpertsConfig, activation: int, up: Any, down: Any, dtype: torch.dtype) -> Any:
    """The compiled kernel; None: experts are not stacked, or in a form that it does not take."""
    if up is None or down is None:
        return None
    from asyncengine.kernels.api import experts

    form = experts.ExpertsForm(config.experts, activation, config.alpha, config.limit)
    return experts.ExpertsKernel(up, down, form, dtype)


def _grouped(options: LayerOptions, config: ExpertsConfig, up: ExpertMatrices, down: ExpertMatrices, gate: Any) -> Any:
    """The Triton kernel for all experts; None: they are not stacked, or it does not run here."""
    weights = [grouped_weight(options, matrices.forms[0]) for matrices in (up, down) if len(matrices.forms) == 1]
    if len(weights) < 2 or any(weight is None for weight in weights):
        return None
    from asyncengine.kernels.api import gpu

    within = config.gated and config.activation == "silu" and config.bias is None
    first, second = gpu.ExpertWeights(weights[0], up.bias), gpu.ExpertWeights(weights[1], down.bias)
    return partial(gpu.mix, up=first, down=second, activation=None if within else gate, experts=config.experts)


def clamped(both: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """[..., 2 * width] -> [..., width]: g sigmoid(alpha g) (u + 1) of neighbours g and u, bounded (gpt-oss)."""
    gate, up = both.float()[..., ::2].clamp(max=limit), both.float()[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(both.dtype)
