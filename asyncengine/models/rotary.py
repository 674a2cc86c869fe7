"""Rotary position embedding: fixed frequencies, and a form of its application that does not copy halves around."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.kernels import Kernels, Rotation
from asyncengine.models.reused_memory import new_tensor

MOST_LOOKED_UP = 64
"""Positions up to which rows are copied without letting go of the interpreter's lock."""
_FUNCTION = "apply_rotary_pos_emb"
Same = Callable[[torch.Tensor, torch.Tensor], bool]
Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def freeze_rotary(module: Any, max_model_len: int, device: torch.device) -> None:
    """Fix frequencies that transformers would choose anew per step by the longest position in it.

    "dynamic" and "longrope" scaling depend on sequence length; in a flat batch that would be the longest neighbour's,
    and keys cached under one choice would meet queries under another. They are set once, for `max_model_len`, as vLLM
    does. Other types are left alone.
    """
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds is None or not hasattr(part, "original_max_seq_len"):
            continue
        last = torch.tensor([[max_model_len - 1]], device=device)
        sample = torch.zeros(1, dtype=torch.float32, device=device)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _changes(kind):
                    part(sample, last, layer_type)
            part.rope_type = {key: "default" if _changes(kind) else kind for key, kind in kinds.items()}
        elif _changes(kinds):
            part(sample, last)
            part.rope_type = "default"


class RotaryTable:
    """Cosines and sines of the first positions, computed once by the model's own rotary embedding.

    On a CPU a step's own would take ten small operations, longer than the attention of a layer. The table is made when
    a call first finds `most` positions set, which must not be before frequencies are frozen; 0: none.
    """

    def __init__(self, rotary: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.most = 0
        self._rotary = rotary
        self._arguments, self._keywords = arguments, keywords
        self._table: tuple[torch.Tensor, ...] = ()
        self._copy_rows: Any = None

    def __call__(self, like: torch.Tensor, positions: torch.Tensor) -> Any:
        """What the rotary embedding gives for positions [1, T] and states of the type of `like`."""
        if self.most == 0 or like.device.type != "cpu" or positions.numpy().max() >= self.most:
            return self._rotary(like, positions, *self._arguments, **self._keywords)
        if not self._table:
            every = torch.arange(self.most)[None]
            made = self._rotary(like, every, *self._arguments, **self._keywords)
            self._table = tuple(part[0].contiguous() for part in made)
            if compiler_missing(like.dtype, like.device) is None:
                from asyncengine.kernels.cpu.gather import copy_rows

                self._copy_rows = copy_rows
        if positions.shape[1] > MOST_LOOKED_UP or self._copy_rows is None:
            return tuple(part.index_select(0, positions[0])[None] for part in self._table)
        found = tuple(new_tensor((1, positions.shape[1], part.shape[1]), part.dtype) for part in self._table)
        for part, out in zip(self._table, found, strict=True):
            self._copy_rows(positions, part, out)
        return found


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def fuse_rotary(
    attention_modules: list[Any],
    same: Same,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None = None,
) -> int:
    """Give attention modules whose family rotates halves a faster application, `kernels`' if given; returns how many.

    Those that have one already are left alone. A module's `forward` is rebound on the instance with the one global name
    exchanged, so neither the family's source nor any other engine in the process is touched. Candidates are compared
    with the original on random input.
    """
    rebound: dict[type, FunctionType | None] = {}
    count = 0
    for module in attention_modules:
        kind = type(module)
        if kind not in rebound:
            rebound[kind] = _rebind(kind, same, dtype, device, kernels)
        forward = rebound[kind]
        if forward is not None and "forward" not in module.__dict__:
            module.forward = MethodType(forward, module)
            count += 1
    return count


def _rebind(
    kind: type, same: Same, dtype: torch.dtype, device: torch.device, kernels: Kernels | None
) -> FunctionType | None:
    forward: Any = kind.__dict__.get("forward")
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    original = forward.__globals__.get(_FUNCTION)
    if _FUNCTION not in forward.__code__.co_names or original is None:
        return None
    candidate = _halves_rotated(original)
    if kernels is not None:
        rotation = kernels.rotation()
        if rotation is None:
            return None
        candidate = _by_kernel(candidate, rotation)
    query, key, cos, sin = (
        torch.randn(shape, dtype=torch.float32).to(dtype).to(device)
        for shape in ((1, 4, 5, 64), (1, 2, 5, 64), (1, 5, 64), (1, 5, 64))
    )
    cos, sin = (torch.cat((part[..., :32],) * 2, dim=-1) for part in (cos, sin))
    try:
        expected, found = original(query, key, cos, sin), candidate(query, key, cos, sin)
    except Exception:  # another calling convention, or a kernel that cannot be built: not ours to replace
        return None
    if not all(same(left, right) for left, right in zip(expected, found, strict=True)):
        return None
    bound = FunctionType(
        forward.__code__,
        {**forward.__globals__, _FUNCTION: candidate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound


def _halves_rotated(original: Rotate) -> Rotate:
    """x cos + rotate_half(x) sin without building rotate_half(x); `original` for shapes it does not cover."""

    def apply(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or cos.shape[-1] != query.shape[-1] or cos.dim() != 3 or cos.dtype != query.dtype:
            return original(query, key, cos, sin, *args, **kwargs)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    return apply


def _by_kernel(halves: Rotate, rotation: Rotation) -> Rotate:
    """`rotation` where it has a kernel, else `halves`."""

    def apply(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = cos.dim() == 3 and cos.shape[0] == 1 and cos.shape[-1] == query.shape[-1]
        if args or kwargs or not whole or not rotation.fits(query):
            return halves(query, key, cos, sin, *args, **kwargs)
        return rotation(query, key, cos, sin)

    return apply


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
