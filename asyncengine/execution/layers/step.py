"""The arguments of one forward beside its tokens: positions, attention backend, adapters, states and pictures; and the
products of a model that adapters target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch

from asyncengine.execution.attention.base import LayerSpec, StepAttention
from asyncengine.execution.layers.states import StateSpec, StateStep
from asyncengine.execution.layers.weight_forms import WeightForm
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row


@dataclass(frozen=True, slots=True, eq=False)
class LoraTarget:
    """One product of the model that LoRA may target, and the modules whose outputs lie in it side by side."""

    in_features: int
    """Rows of the table for an embedding."""
    modules: tuple[tuple[str, int], ...]
    """(Hugging Face path, width of its output); "" for outputs of no module."""
    type: Literal["linear", "conv1d", "embedding"] = "linear"
    head: Literal["", "own", "tied"] = ""
    """The output layer, which gets the rows whose logits are wanted: with its own weight, or the embedding's."""
    scale: float = 1.0
    local_outputs: tuple[tuple[slice, ...], ...] | None = None
    """The outputs of each module that this process computes; None: all."""
    is_local: bool = True
    """False: another process computes it."""
    read_rows: Callable[[torch.Tensor, torch.Tensor], object] | None = None
    """`WeightForm.read_rows` of its weight [outputs, inputs]. None for an embedding, and where no process has all rows.
    """
    bias: torch.Tensor | None = None
    """The bias of the outputs that this process computes."""
    new_weight: Callable[[int], WeightForm] | None = None
    """Memory for an output layer of the given number of rows. None: plain memory, or this is no output layer."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Outputs of each module that this process computes."""
        if self.local_outputs is None:
            return tuple(width for _, width in self.modules)
        return tuple(sum(rows.stop - rows.start for rows in ranges) for ranges in self.local_outputs)

    def local_rows(self, module: int, b: torch.Tensor) -> torch.Tensor:
        """Rows of b [all outputs of module number `module`, ...] whose outputs this process computes."""
        return b if self.local_outputs is None else torch.cat([b[rows] for rows in self.local_outputs[module]])

    @property
    def embedding(self) -> bool:
        return self.type == "embedding"

    @property
    def path(self) -> str:
        """Path of the first module, by which layers name the product."""
        return self.modules[0][0]


class Mixture(Protocol):
    """A mixture of experts in a layer, as routes are traced."""

    def chosen(self, residual: torch.Tensor, x: torch.Tensor, /) -> torch.Tensor:
        """The experts of each row, int64 [rows, experts of a row], best first, of the stream [rows, width] or of its
        norm x."""


class AdapterRecords(NamedTuple):
    """Addresses of a step's adapters for a compiled kernel of several layers."""

    products: int
    """int64 for each product: the address of its factors (`kernels.cpu.lora.Factors`), 0 where it has none."""
    rows: int
    """The step's rows by adapter (`kernels.cpu.lora.RowGroups`)."""
    memory: int
    """Working memory for the numbers between the two factors of any of the products."""


class RowAdapters(Protocol):
    """Low-rank adapters of the rows of one step (LoRA, Hu et al. 2021)."""

    def changes(self, path: str) -> bool:
        """Whether `add` may change the outputs of the linear layer whose first matrix is `path`."""

    def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add each row's delta to y [rows, outputs] in place, for the linear layer whose first matrix is `path`.

        x [rows, inputs]; token ids for an embedding.
        """

    def records(self, paths: tuple[str, ...]) -> AdapterRecords | None:
        """Records of the products `paths` for a compiled kernel that adds the deltas; None: only `add` can."""


@dataclass(slots=True)
class Traces:
    """Hidden states and experts of a step's T tokens, and steering vectors added to them, for requests that ask."""

    layers: Collection[int] = ()
    """Numbers, from 0, of those whose hidden states are asked for."""
    experts: list[torch.Tensor] | None = None
    """`StepContext.routes`."""
    expert_type: torch.dtype | None = None
    """Type of their numbers in an answer."""
    stream: list[torch.Tensor] = field(default_factory=list)
    """Hidden states [T, width] of each layer; empty for those that are not asked for."""
    added: dict[int, list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)
    """(first token, end, vector float32 [width]) by the layer, from 1, behind which the stream is steered by it."""

    def steer(self, rows: Sequence[Row], bounds: Sequence[int]) -> None:
        """Note the steering vectors of a step's `rows`; the tokens of row i are those from `bounds[i]` up to the next
        bound."""
        for row, tokens in zip(rows, pairwise(bounds), strict=True):
            for layer, vector in row.spec.params.steering_vectors.items():
                numbers = torch.frombuffer(vector, dtype=torch.float32)
                self.added.setdefault(layer, []).append((*tokens, numbers))

    def steered(self, h: torch.Tensor, layer: int) -> torch.Tensor:
        """The stream [T, width] behind a layer, with what requests add to it."""
        h = h.clone()
        for first, end, vector in self.added[layer]:
            h[first:end] += vector
        return h

    def append(self, h: torch.Tensor) -> None:
        """Take the stream [T, width] before the next layer, or behind the last."""
        self.stream.append(h if len(self.stream) in self.layers else h.new_empty(0))

    def end(self, hidden: torch.Tensor) -> None:
        """Take the final norm [T, width] of the stream behind the last layer in that one's place, as transformers."""
        self.stream.pop()
        self.append(hidden)

    def of(self, params: SamplingParams, first: int, end: int) -> torch.Tensor:
        """[tokens, layers, ...] of the tokens from `first` up to `end`, as a request with `params` asks for it."""
        tensors, dtype = self.experts or [], self.expert_type
        if params.return_hidden_states:
            tensors, dtype = [self.stream[layer] for layer in params.return_hidden_states], torch.float32
        return torch.stack([tensor[first:end].to(dtype) for tensor in tensors], dim=1)


class Encoded(NamedTuple):
    """An encoded picture, the language model's input of n tokens."""

    features: torch.Tensor
    """[n, width], instead of embeddings."""
    deep: tuple[torch.Tensor, ...] = ()
    """[n, width] each, added to the stream after the first layers (Qwen3-VL)."""


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """The pictures of a step: hidden states that take the places of embeddings. M tokens of T."""

    tokens: torch.Tensor | None = None
    """int64 [M] on the device, ascending: tokens of the step that stand for pictures; None: there are none."""
    features: torch.Tensor | None = None
    """[M, width]."""
    deep: tuple[torch.Tensor, ...] = ()
    """[M, width] each: added to the stream behind the first layers (Qwen3-VL)."""
    axes: torch.Tensor | None = None
    """int64 [3, T] positions in time, rows and columns, where the model's positions have three axes."""


NO_IMAGES = StepImages()


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """An argument of every layer. Layers keep no reference to anything of a step."""

    positions: torch.Tensor
    """int64 [T] on the device."""
    backend: StepAttention
    """Planned for this step."""
    adapters: RowAdapters | None = None
    """Adapters of the step's T tokens; None: no row has one."""
    row_adapters: RowAdapters | None = None
    """Adapters of the rows whose logits are wanted."""
    states: StateStep | None = None
    """None: the model keeps none."""
    images: StepImages | None = None
    """None: no row has any."""
    routes: list[torch.Tensor] | None = None
    """Takes the experts of the step's tokens, int64 [T, experts of a token], best first, of each mixture in the model's
    order. None: no request asks for them."""
    traces: Traces | None = None
    """Takes hidden states, and has the steering vectors. None: no request asks for either."""

    def note_routes(self, mixtures: Callable[[], Sequence[Mixture]], residual: torch.Tensor, x: torch.Tensor) -> None:
        """Note the experts of all tokens in the `mixtures` of a layer, which reads the stream [T, width] or its norm x.

        Routers are asked once more: the layer itself may compute a few of the tokens alone, and has to, as with all of
        them adapters could add up in another order.
        """
        if self.routes is not None:
            self.routes.extend(mixture.chosen(residual, x) for mixture in mixtures())


class StreamHooks:
    """The changes of one step to the residual stream [T, width] between layers, and the copies that it keeps of it."""

    def __init__(self, step: StepContext, kept: list[torch.Tensor] | Traces | None, taps: Sequence[int]) -> None:
        self._images, self._traces = step.images or NO_IMAGES, step.traces
        self._kept, self._taps = kept, taps
        self._streams: list[torch.Tensor] = []

    @classmethod
    def of(cls, step: StepContext, kept: list[torch.Tensor] | Traces | None, taps: Sequence[int]) -> StreamHooks | None:
        """The hooks of a step; None if it leaves the stream alone. `kept` takes the stream before each layer and behind
        the last; `taps`: layers before which a head reads it, their number for behind the last."""
        deep = step.images is not None and step.images.deep
        steered = step.traces is not None and step.traces.added
        return None if kept is None and not taps and not deep and not steered else cls(step, kept, taps)

    def keep(self, layer: int, h: torch.Tensor) -> None:
        """Keep the stream before a layer."""
        if self._kept is not None:
            self._kept.append(h)
        if layer in self._taps:
            self._streams.append(h)

    def add(
        self, layer: int, h: torch.Tensor, x: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the stream behind a layer, its norm), of what the layer gave, with what pictures and requests add."""
        stream, images, traces = h, self._images, self._traces
        if images.tokens is not None and layer < len(images.deep):
            stream = stream.index_add(0, images.tokens, images.deep[layer])
        if traces is not None and layer + 1 in traces.added:
            stream = traces.steered(stream, layer + 1)
        if stream is not h:
            x = stream if norm is None else norm(stream)
        return stream, x

    def beside(self, x: torch.Tensor, joined: Callable[..., torch.Tensor]) -> torch.Tensor:
        """x [T, width] with the streams of `taps` beside it, if there are any."""
        return joined(x, *self._streams) if self._streams else x


class CausalLM(ABC):
    """A decoder-only language model that a runner can run."""

    input_vocab_size: int
    """Token ids are below it."""
    vocab_size: int
    """Width of the logits."""
    dtype: torch.dtype
    device: torch.device

    specs: Sequence[LayerSpec]
    """One for each layer, as an attention backend needs them."""
    states: Sequence[StateSpec] = ()
    """One for each state layer; empty: the model keeps none."""

    @property
    @abstractmethod
    def unsteady(self) -> str | None:
        """Why a token's results may depend on the other tokens of its step; None: they do not, to the bit."""

    @property
    @abstractmethod
    def compiled(self) -> bool:
        """Whether short steps run in compiled kernels throughout, so that torch's threads have nothing to do."""

    @abstractmethod
    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab], float32 where a kernel makes them so, of `rows` (int64 [N], ascending) of ids [T]."""

    @abstractmethod
    def lora_targets(self) -> list[LoraTarget]:
        """Products that adapters may change, in the model's order."""

    def unbind(self) -> None:  # noqa: B027
        """Let go of the attention backend of earlier forwards. Idempotent. Here: nothing of a step is kept."""
