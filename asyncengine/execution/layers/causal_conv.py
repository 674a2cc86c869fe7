"""Short causal convolution of each channel by itself, over a sequence's last inputs (depthwise, as Mamba has it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.nn import functional

from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.sharded import Spans, own_rows
from asyncengine.execution.layers.states import Slots, StateStep, advance_segments, each_token
from asyncengine.execution.layers.stored import Layer, TensorSlot
from asyncengine.kernels.api import triton_missing

ConvActivation = Literal["silu"]


class CausalConv(Layer):
    """y[t] = act(bias + sum over i of weight[i] * x[t - taps + 1 + i]), for each channel; x [T, channels].

    Sums are float32 and rounded once, after the activation. What stands before a sequence's first token is zero.
    """

    def __init__(
        self, options: LayerOptions, path: str, channels: int, taps: int, *, bias: bool = False,
        activation: ConvActivation | None = None, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        """`path`: of the checkpoint's tensors "weight" [channels, 1, taps] and "bias" [channels]. `spans`: this rank's
        channels; None: all."""
        self.path, self._whole, self.taps = path, channels, taps
        self._spans = [(0, channels)] if spans is None else spans
        self.channels = channels = sum(last - first for first, last in self._spans)
        self.activation = activation
        self.weight = options.zeros(taps, channels, dtype=torch.float32)
        self.bias = options.zeros(channels, dtype=torch.float32) if bias else None
        self.window = (taps - 1, channels)
        """Shape of a sequence's window, the inputs before the next token."""
        self.on_device: Any = None
        """The module of Triton kernels, some of which the layers around need as well; None: none run here."""
        if triton_missing(options.device) is None:
            from asyncengine.kernels.api import gpu

            self.on_device = gpu

    def __call__(self, x: torch.Tensor, step: StateStep, index: int) -> torch.Tensor:
        """[T, channels] of a step's inputs x [T, channels], whose rows may be strided, with the windows of state layer
        `index`, which has no other state."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)

        def advance(
            tokens: slice | torch.Tensor, _: Any, windows: torch.Tensor, slots: Slots | None
        ) -> tuple[None, torch.Tensor]:
            out[tokens], windows = self.advance(x[tokens], windows, slots)
            return None, windows

        advance_segments(step, index, advance)
        return out

    def advance(self, x: torch.Tensor, windows: torch.Tensor, slots: Slots | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(results [tokens, channels], windows after them) for inputs x [tokens, channels] of sequences with equally
        many tokens each, by Triton or torch. `windows` [sequences, taps - 1, channels]; with `slots` it is a pool, in
        which the windows of sequences of one token each are advanced in place."""
        if self.on_device is not None:
            result: tuple[torch.Tensor, torch.Tensor] = self.on_device.convolve(
                x, windows, slots, self.weight, self.bias, self.activation is not None
            )
            return result
        if slots is not None:
            out, moved = self.advance(x, windows.index_select(0, slots[0]), None)
            return out, windows.index_copy_(0, slots[1], moved)
        inputs = torch.cat((windows, torch.unflatten(x, 0, (len(windows), -1))), dim=1)
        wide, tokens = inputs.float(), len(x) // len(windows)
        total = wide[:, :tokens] * self.weight[0]
        if self.bias is not None:
            total = total + self.bias
        for tap in range(1, self.taps):
            total = total + wide[:, tap : tap + tokens] * self.weight[tap]
        total = total.flatten(0, 1)
        if self.activation is not None:
            total = each_token(functional.silu, total)
        return total.to(x.dtype), inputs[:, tokens:]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        yield f"{self.path}.weight", self.weight_slot(0, self._whole)
        if self.bias is not None:
            rows = own_rows(self._spans, 0, self._whole)
            yield f"{self.path}.bias", TensorSlot.some(self.bias, self._whole, rows, 0.0)

    def weight_slot(self, first: int, channels: int) -> TensorSlot:
        """The slot of a weight of `channels` channels from `first` on, if a checkpoint has the channels in several
        tensors."""

        def load(tensor: Any) -> None:
            for rows, local_channels in own_rows(self._spans, first, channels):
                self.weight[:, local_channels].copy_(tensor[rows, 0].T)

        return TensorSlot((channels, 1, self.taps), load)
