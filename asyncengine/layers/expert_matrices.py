"""The matrices of a mixture's experts, and the forms in which kernels take those of all experts at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from asyncengine.kernels.cuda import triton_missing
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.stored import StoredForm, StoredMatrix
from asyncengine.layers.stored_weight import ChunkedWeight
from asyncengine.layers.weight_forms import DenseWeight, WeightForm


class ExpertMatrices:
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

    def takes(self, first: int) -> StoredForm | None:
        """The stored form that the first expert's rows from `first` on take, as in `WeightForm.takes`."""
        form, begin = self._place(0, first)
        return form.takes(begin)

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

    @property
    def nbytes(self) -> int:
        return sum(form.nbytes for form in self.forms) + (0 if self.bias is None else self.bias.nbytes)


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
