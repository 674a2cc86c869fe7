"""Rotary position embedding (Su et al. 2021): cosines and sines of a step's positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from asyncengine.kernels.api import compiler_missing, triton_missing

if TYPE_CHECKING:
    from asyncengine.kernels.api import operations

_TABLE = 8192
"""Most positions whose cosines and sines are kept: a few MiB."""
_FEW = 64
"""Positions up to which rows are copied without releasing the interpreter lock."""


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Frequencies that do not change between steps.

    Scalings that depend on the length of a sequence ("dynamic", "longrope") are set once, for the longest possible
    sequence, as in vLLM: in a flat batch they would follow the longest neighbour, and keys cached under one scaling
    would meet queries under another.
    """

    frequencies: tuple[float, ...]
    """Radians by which each pair of dimensions turns from one position to the next; float32 values."""
    scaling: float = 1.0
    """A factor of cosines and sines (YaRN)."""
    style: Literal["halves", "interleaved", "alibi"] = "halves"
    """A pair is (i, i + dim / 2), or (2 i, 2 i + 1) (GPT-J, Cohere, GLM). "alibi": nothing is rotated, and cosines and
    sines are replaced by positions as (whole 256s, the rest), twice; both are exact in any dtype."""
    exact: bool = False
    """Whether cosines and sines are float32 in a model of any dtype, and results are rounded once (OLMo 2)."""
    query_growth: tuple[float, int] | None = None
    """(beta, period): queries are multiplied by 1 + beta * log(1 + position // period) (Llama 4, Ministral 3); not
    together with norms of heads."""
    growth_begins: int = 0
    """The position that this growth counts from (Llama 4: 1)."""
    axes: tuple[int, ...] = ()
    """The axis of the position by which each pair turns, where pictures have three: 0 time, 1 rows, 2 columns (M-RoPE,
    Wang et al. 2024)."""

    @property
    def dim(self) -> int:
        """Number of leading dimensions of a head that are rotated."""
        return 2 * len(self.frequencies)


class Angles(NamedTuple):
    """Cosines and sines that rotate a step's queries and keys."""

    cos: torch.Tensor
    """[T, rotary dim]."""
    sin: torch.Tensor
    style: str
    """The pairs of dimensions that are rotated together, as in `RotaryConfig`."""
    query_scale: torch.Tensor | None = None
    """Float32 [T] factors of queries; None: they are not scaled."""


class Rotary:
    """Cosines and sines [T, dim] in the model's dtype, for positions int64 [T] on its device.

    On a GPU one kernel computes them. On a CPU that would take ten small operations a step, so those of the first
    positions are kept in a table, from which a few rows are copied to memory that the next step reuses.
    """

    def __init__(self, config: RotaryConfig, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._dtype = torch.float32 if config.exact else dtype
        self._frequencies = torch.tensor(np.array(config.frequencies, dtype=np.float32), device=device)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._axes = torch.tensor(config.axes, device=device)
        self._length = min(length, _TABLE)
        self._few: tuple[operations.RowCopies, operations.RowCopies] | None = None
        self._kernel: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        if triton_missing(device) is None:
            from asyncengine.kernels.api import gpu

            self._kernel = gpu.angles
        elif device.type == "cpu":
            self._tables = self._compute(torch.arange(self._length))
            if compiler_missing(dtype, device) is None:
                from asyncengine.kernels.api import operations

                self._few = operations.RowCopies(self._tables[0], _FEW), operations.RowCopies(self._tables[1], _FEW)

    def __call__(self, positions: torch.Tensor, axes: torch.Tensor | None = None) -> Angles:
        """`axes`: int64 [3, T], the same positions where a step has pictures; None: all three are alike."""
        if axes is not None and self.config.axes:
            return Angles(*self._turned(axes[self._axes].T.to(torch.float32) * self._frequencies), self.config.style)
        angles = self._angles(positions)
        growth = self.config.query_growth
        first = self.config.growth_begins
        if growth is None or (self._tables is not None and positions.numpy().max(initial=0) + first < growth[1]):
            return angles
        scale = 1 + growth[0] * torch.log(1 + ((positions + first) // growth[1]).float())
        return angles._replace(query_scale=scale.to(self._dtype).float())

    def _angles(self, positions: torch.Tensor) -> Angles:
        tables, few, style = self._tables, self._few, self.config.style
        if few is not None and positions.shape[0] <= _FEW and max(positions.tolist(), default=0) < self._length:
            cos, sin = few
            return Angles(cos(positions), sin(positions), style)
        if tables is None or positions.numpy().max(initial=0) >= self._length:
            return Angles(*self._compute(positions), style)
        return Angles(tables[0].index_select(0, positions), tables[1].index_select(0, positions), style)

    def _compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.style == "alibi":
            positions_of = torch.stack((positions // 256, positions % 256), dim=1).repeat(1, 2).to(self._dtype)
            return positions_of, positions_of
        if self._kernel is not None:
            interleaved = self.config.style == "interleaved"
            return self._kernel(positions, self._frequencies, self.config.scaling, interleaved, self._dtype)
        return self._turned(positions.to(torch.float32)[:, None] * self._frequencies)

    def _turned(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, dim] of angles [T, dim / 2]."""
        if self.config.style == "halves":
            angles = torch.cat((angles, angles), dim=-1)
        else:
            angles = angles.repeat_interleave(2, dim=-1)
        scaling = self.config.scaling
        return (angles.cos() * scaling).to(self._dtype), (angles.sin() * scaling).to(self._dtype)


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """x [T, heads, dim] with its first dimensions rotated."""
    dim = angles.cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    if angles.style == "interleaved":
        wide = turned.float()
        pairs = torch.stack((-wide[..., 1::2], wide[..., ::2]), dim=-1).flatten(-2)
        out = (wide * cos.float() + pairs * sin.float()).to(x.dtype)
    else:
        half = dim // 2
        out = turned * cos
        out[..., :half].addcmul_(turned[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(turned[..., :half], sin[..., half:])
        out = out.to(x.dtype)
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), dim=-1)
