"""Values from one computation, gradients from another.

The engine's values replace those that a module of transformers would compute; the module itself runs in the backward
pass, at exactly these inputs, and its vector-Jacobian product is the gradient. That is gradient checkpointing (Chen et
al. 2016) whose first forward pass was done by the engine.
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
"""A computation that the backward pass runs: a function of its inputs."""


class _Recomputed(torch.autograd.Function):
    """(call, values, parameters, *inputs, *parameters) -> values, with the gradients of call(inputs)."""

    @staticmethod
    def forward(ctx: Any, call: Call, values: Outputs, parameters: Sequence[torch.Tensor], *tensors: Any) -> Outputs:
        ctx.call, ctx.parameters = call, parameters
        ctx.autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.save_for_backward(*tensors)  # which raises if one is changed before the backward pass
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        needed = list(zip(saved[: len(saved) - len(ctx.parameters)], wanted, strict=False))
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in needed]
        on, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast("cpu", dtype=dtype, enabled=on):
            results = ctx.call(inputs)
        sources = [*inputs, *ctx.parameters]
        indices = [index for index, needs in enumerate(wanted) if needs]
        grads: list[torch.Tensor | None] = [None] * len(sources)
        outputs = [(out, grad.to(out.dtype)) for out, grad in zip(results, gradients, strict=True) if out.requires_grad]
        if outputs and indices:
            outs, grad_outs = zip(*outputs, strict=True)
            input_grads = torch.autograd.grad(outs, [sources[index] for index in indices], grad_outs, allow_unused=True)
            for index, grad in zip(indices, input_grads, strict=True):
                grads[index] = grad
        return (None, None, None, *grads)


def recomputed(
    call: Call, values: Outputs, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Outputs:
    """`values`, with the gradients of call(inputs), which runs in the backward pass. `parameters`: tensors besides
    `inputs` that the call depends on."""
    apply: Any = _Recomputed.apply  # which torch gives a type from 2.14 on
    return apply(call, values, parameters, *inputs, *parameters)


def recomputed_module(module: Any, forward: Any, value: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """`value`, with the gradients of `forward(*args, **kwargs)` of a module: to tensors anywhere in its arguments, and
    to its parameters."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    tracked = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [leaves[index] for index in tracked]

    def call(tensors: Sequence[torch.Tensor]) -> Outputs:
        filled = list(leaves)
        for index, tensor in zip(tracked, tensors, strict=True):
            filled[index] = tensor
        positional, keywords = pytree.tree_unflatten(filled, form)
        before = getattr(module, "gradient_checkpointing", False)
        module.gradient_checkpointing = False  # this is the second pass already
        try:
            result = forward(*positional, **keywords)
        finally:
            module.gradient_checkpointing = before
        return (result[0] if isinstance(result, tuple) else result,)

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return recomputed(call, (value,), inputs, parameters)[0]


class RoutingReplay(TorchFunctionMode):
    """A context in which routers choose the given experts, whatever their scores are.

    It is R3 of Ma et al. 2025, arXiv 2510.11370. A router's choice is recognised by its shape: a `topk` over the number
    of experts with as many results. The experts' weights are computed from the scores as usual.
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
    """`value` in place of x: its gradient is passed on to x unchanged."""
    return recomputed(tuple, (value,), (x,), ())[0]
