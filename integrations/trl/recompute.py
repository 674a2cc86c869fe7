"""Values from one computation, gradients from another.

What the engine has computed takes the place of what a module of transformers would; the module itself runs in the
backward pass, at exactly these inputs, and its vector-Jacobian product is the gradient. That is gradient checkpointing
(Chen et al. 2016) whose first forward somebody else has done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

Outputs = tuple[torch.Tensor, ...]
Call = Callable[[Sequence[torch.Tensor]], Outputs]
"""A computation to be done again: a function of its inputs."""


class _Recomputed(torch.autograd.Function):
    """(call, values, parameters, *inputs, *parameters) -> values, with the gradients of call(inputs)."""

    @staticmethod
    def forward(ctx: Any, call: Call, values: Outputs, parameters: Sequence[torch.Tensor], *tensors: Any) -> Outputs:
        ctx.call, ctx.parameters = call, parameters
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(*tensors)  # which notices who changes one before the backward pass
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        needed = list(zip(saved[: len(saved) - len(ctx.parameters)], wanted, strict=False))
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in needed]
        on, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast("cpu", dtype=dtype, enabled=on):
            made = ctx.call(inputs)
        sources = [*inputs, *ctx.parameters]
        places = [place for place, needs in enumerate(wanted) if needs]
        grads: list[torch.Tensor | None] = [None] * len(sources)
        outputs = [(out, grad.to(out.dtype)) for out, grad in zip(made, gradients, strict=True) if out.requires_grad]
        if outputs and places:
            own, given = zip(*outputs, strict=True)
            found = torch.autograd.grad(own, [sources[place] for place in places], given, allow_unused=True)
            for place, grad in zip(places, found, strict=True):
                grads[place] = grad
        return (None, None, None, *grads)


def recomputed(
    call: Call, values: Outputs, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Outputs:
    """`values`, with the gradients of call(inputs), which is run in the backward pass. `parameters`: what else it is a
    function of."""
    apply: Any = _Recomputed.apply  # which torch gives a type from 2.14 on
    return apply(call, values, parameters, *inputs, *parameters)


def recomputed_module(module: Any, forward: Any, value: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`value`, with the gradients of `forward(*args, **kwargs)` of a module: to tensors anywhere in its arguments, and
    to its parameters."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    tracked = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [leaves[place] for place in tracked]

    def call(own: Sequence[torch.Tensor]) -> Outputs:
        given = list(leaves)
        for place, tensor in zip(tracked, own, strict=True):
            given[place] = tensor
        positional, named = pytree.tree_unflatten(given, form)
        before = getattr(module, "gradient_checkpointing", False)
        module.gradient_checkpointing = False  # this is the second pass already
        try:
            made = forward(*positional, **named)
        finally:
            module.gradient_checkpointing = before
        return (made[0] if isinstance(made, tuple) else made,)

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return recomputed(call, (value,), inputs, parameters)[0]


class RoutingReplay(TorchFunctionMode):
    """While it is entered, routers choose these experts, whatever their scores are.

    It is R3 of Ma et al. 2025, arXiv 2510.11370. A choice is known by its shape: `topk` of as many of as many. Weights
    are of the scores at the experts given.
    """

    def __init__(self, experts: int, chosen: torch.Tensor) -> None:
        """`chosen`: int64 [R, longest, experts of a token]."""
        super().__init__()
        self._experts, self._chosen = experts, chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            scores, count = args[0], args[1] if len(args) > 1 else kwargs["k"]
            shape = (*scores.shape[:-1], count)
            if scores.shape[-1] == self._experts and self._chosen.numel() == math.prod(shape):
                ids = self._chosen.view(shape)
                return torch.return_types.topk((scores.gather(-1, ids), ids))
        return func(*args, **(kwargs or {}))


def replaced(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` in the place of x: the gradient passes as if it were x."""
    return recomputed(tuple, (value,), (x,), ())[0]
