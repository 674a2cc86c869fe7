"""Protocols by which the units of the package know each other; nothing else of another unit is imported.

Core makes batches and owns the cache; an `Executor` computes batches. A `GrammarCompiler` makes matchers of grammars,
an `AdapterStore` keeps adapters, an `AdapterAdmission` gives them slots on the device. `asyncengine.assembly` brings
the concrete ones together; tests bring fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from asyncengine.errors import UnsupportedModel
from asyncengine.sampling_params import OnBudget

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from asyncengine.config import EngineConfig
    from asyncengine.options import WeightSource
    from asyncengine.stats import ThreadStats
    from asyncengine.step import AdapterSwap, Batch, RecordType, StepResult

# ---------------------------------------------------------------- execution


class StepHandle(Protocol):
    """A launched step."""

    @property
    def ready(self) -> bool:
        """True: `wait` does not block."""

    def block(self) -> None:
        """Return when `wait` does not block, without the interpreter's lock meanwhile. Called in launch order, on any
        thread."""

    def wait(self) -> StepResult:
        """The result. Called once, in launch order, on any thread."""


class Executor(Protocol):
    """Runs steps, one after another, on whatever thread calls it. Holds weights, KV memory and per-slot state.

    A class that inherits from it takes over what it cannot do better."""

    num_pages: int
    """Pages of KV memory, page 0 included. Page 0 is padding and never handed out."""
    page_size: int
    num_states: int
    """Slots for recurrent states, slot 0 included, which is never handed out. 0: the model keeps none."""
    num_window_pages: int
    """Pages of the layers with windows, page 0 included. 0: all layers have the same pages."""
    windows: tuple[tuple[int, int], ...]
    """(window, chunk) of each kind of attention layer, 0 for none: pages that none of them sees are given back."""
    draft_model: Guesser | None = None
    traced_parts: Sequence[str] = ()
    """Names of its methods that are parts of a step (`engine.profiling`)."""

    def launch(self, batch: Batch) -> StepHandle:
        """Hand one step to the device and return without waiting for it, if the device is not the CPU.

        A fault of one row goes into `StepResult.errors`; raising, here or in `wait`, kills the engine.
        """

    def close(self) -> None:
        """Free everything. Called once, on the thread that executed."""

    @property
    def asynchronous(self) -> bool:
        """True: `launch` returns while the device computes."""
        return False

    @property
    def brief_tokens(self) -> int:
        """Most tokens of a step of texts that takes milliseconds of the thread that launches it."""
        return 0

    def is_brief(self, batch: Batch) -> bool:
        """True: `launch` takes milliseconds, and waits for no other thread."""
        return False

    def threads(self) -> ThreadStats | None:
        """The threads that compute steps; None: it has none of its own. May be called from any thread."""
        return None

    def page_memory(self) -> PageMemory:
        """The memory of pages. Raises where these cannot be copied."""
        raise UnsupportedModel("this engine's pages cannot be copied")

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """Check other weights (None: the model's own, once more). Returns the call that writes them, to be made while
        no step runs. Raises the error that refuses them."""
        raise UnsupportedModel("this engine's weights cannot be exchanged")

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        """Check whether weights, caches or both may go. Returns the call that gives their memory back. Raises the error
        that refuses it."""
        raise UnsupportedModel("this engine's memory cannot be given back while it lives")


class PageMemory(Protocol):
    """Pages, window pages and states of an executor, as bytes. Used by several threads, each page by one at a time."""

    layout: str
    """The order of the bytes and their types, in words: they are of use only where it is the same."""

    def nbytes(self, record_type: RecordType) -> int:
        """Bytes of one page, window page or state; 0: there are none."""

    def buffers(self, record_type: RecordType, index: int) -> Sequence[memoryview]:
        """The bytes of the page, window page or state `index`: the memory itself, or a copy."""

    def filled(self, record_type: RecordType, index: int, buffers: Sequence[memoryview]) -> None:
        """Take note that `buffers`, which `buffers()` gave, have been filled with new content."""


class Guesser(Protocol):
    """A model that makes the guesses which a step leaves open (`step.OPEN`)."""

    def guess(self, batch: Batch) -> Batch:
        """`batch` as it is to be computed, its open guesses filled in."""

    def close(self) -> None:
        """Free the model. Idempotent."""


# ---------------------------------------------------------------- grammar


class GrammarMatcher(Protocol):
    """State of one constrained output. Lives with its request; used by one thread at a time, that of its row's step."""

    steered_from: int | None
    """Number of output tokens before the first one that is not the model's own: it was put in the place of a sampled
    one so that the output is complete within its budget. None: there is none."""

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write the packed bitmask of allowed next tokens into `mask` (shape [ceil(vocab / 32)], lowest bit first)."""

    def fill_along(self, masks: NDArray[np.int32], drafts: Sequence[int]) -> int:
        """Write the mask of the next token into masks[0], and into masks[n] the one after the first n of `drafts`; the
        matcher does not move. Returns the number of masks filled: it stops behind a draft that the grammar forbids."""

    def accept(self, token_id: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        """Move past a sampled token. Returns the tokens to append: that one, or the one that steering puts in its
        place, then (`jump`) those after it about which the grammar leaves no choice. Raises `GrammarError`.

        `others` returns allowed tokens that the model may say instead, in the order in which they are to be tried."""

    def may_refuse(self, ahead: int) -> bool:
        """Whether `accept` may call `others` for the next token, or for one behind `ahead` drafts. Any thread."""

    def is_terminated(self) -> bool:
        """True: the output is complete and nothing may follow."""

    def fresh(self) -> GrammarMatcher:
        """An equal matcher at its beginning, whatever this one has been through: a replay needs one of its own. Any
        thread may ask for it. Raises `GrammarError` if its compiled grammar broke meanwhile."""

    def overrun(self) -> str | None:
        """The error of an output whose budget is spent, or None if the output may end there."""


class GrammarCompiler(Protocol):
    """The grammar queue's worker: compiles off the event loop and reports through `done`."""

    def check(self, grammar: Any, budget: int, on_budget: OnBudget) -> Any:
        """Check a grammar at submit, on any thread, and return what to compile. Refuses what can be seen to be wrong
        at once.

        Raises `GrammarError`, `BudgetTooSmall`, `QueueFull`.
        """

    def text_check(self, grammar: Any) -> Callable[[str], str | None] | None:
        """The check that finds the fault of a finished text, where compiling `grammar` (as `check` returned it)
        enforces only a part; None where it enforces all."""

    def start(self, ticket: int, order: GrammarOrder, done: GrammarDone) -> None:
        """Begin compiling for `ticket`; call `done(ticket, matcher or error)` once, from any thread."""

    def cancel(self, ticket: int) -> None:
        """Forget `ticket`: its request waits no more. Idempotent."""

    def close(self) -> None: ...


class GrammarOrder(NamedTuple):
    """An order of a request to the compiler."""

    grammar: Any
    """The result of `check`."""
    budget: int
    """Output tokens at most."""
    on_budget: OnBudget


GrammarDone = Callable[[int, GrammarMatcher | Exception], None]


# ---------------------------------------------------------------- lora

LONG_ADAPTER_RUN = 24
"""Neighbouring rows of one adapter from which on matrix products are faster on a CPU, measured with bf16 and two
threads. Their sums are not those of a row alone."""


class ModuleDims(NamedTuple):
    """One module that an adapter may change."""

    inputs: int
    """Features in; rows of the table for an embedding."""
    outputs: int
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    """conv1d: GPT-2's linear, stored transposed. Its adapters look like any linear's."""
    scale: float = 1.0
    """The module's own factor of its output (Gemma 3's embedding): what adapters add must be multiplied as well."""
    bias: bool = False
    """Whether it has a bias, in whose place an adapter may put its own."""
    head: Literal["", "own", "tied"] = ""
    """The output layer: with a weight of its own, or tied to the embedding's."""
    whole: bool = True
    """Whether all of its weight can be read, as DoRA's norms ask for."""

    @property
    def of_tokens(self) -> bool:
        """Whether its weight has a row for each token."""
        return self.kind == "embedding" or self.head != ""

    @property
    def table(self) -> tuple[int, int]:
        """Shape of its weight as checkpoints have it, if that is `of_tokens`."""
        return self[:2] if self.kind == "embedding" else (self.outputs, self.inputs)


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """Weights for one module of the base model: `y += (x @ a.T) @ b.T` (Hu et al. 2021), and what else it changes.

    Ready to be copied into a device slot: on the host, contiguous, finite, in the model's dtype, with everything the
    product is multiplied by folded into `b`: lora_alpha / r, or lora_alpha / sqrt(r) where rslora was used, and the
    module's own scale. An embedding has the same shapes with `in` = rows of its table, so that row t gains
    `b @ a[:, t]` (PEFT's `lora_embedding_A`, `lora_embedding_B`).
    """

    module: str
    """Hugging Face path inside the base model, e.g. "model.layers.0.self_attn.q_proj", "lm_head"."""
    a: torch.Tensor
    """[r, in]."""
    b: torch.Tensor
    """[out, r]."""
    embedding: bool = False
    """True: the module is a lookup table, `a` is indexed by token."""
    magnitude: torch.Tensor | None = None
    """float32 [out]: the norms that rows of the module's weight + b @ a get (DoRA, Liu et al. 2024)."""
    bias: torch.Tensor | None = None
    """float32 [out]: a bias in the place of the module's own, or added to it (`adds_bias`)."""
    adds_bias: bool = False
    table: torch.Tensor | None = None
    """[n, width]: rows in the place of those of the embedding or of the output layer, times the module's scale."""
    tokens: torch.Tensor | None = None
    """int64 [n]: the tokens of these rows; None: the first n, and further ones do not exist."""

    @property
    def rank(self) -> int:
        """0: nothing is added but what the other fields say."""
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = (self.a, self.b, self.magnitude, self.bias, self.table, self.tokens)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class AdapterAdmission(Protocol):
    """Choice of the adapters that share a batch. Pure; the scheduler calls it while it admits (S-LoRA; vLLM's
    `max_loras`)."""

    def fits(self, digest: str) -> bool:
        """Whether `admit` would find a slot now. Changes nothing."""

    def admit(self, digest: str, running: Sequence[str]) -> int | None:
        """Device slot for `digest` beside the adapters of all `running` requests, or None: skip for now."""

    def release(self, digest: str) -> None:
        """No running request and no step in flight names `digest` through one admission any more."""

    def take_swaps(self) -> tuple[AdapterSwap, ...]:
        """Slots whose content has changed since the last call: the next step carries them to the device."""

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""


class AdapterStore(Protocol):
    """Adapters by name, in host memory. Every request that names one has a claim on it, by ticket."""

    def find(self, name: str) -> object:
        """Raises `AdapterNotFound` if no adapter has that name now."""

    def claim(self, tickets: Sequence[int], name: str) -> str:
        """The digest all `tickets` will use, whatever becomes of the name. Raises `AdapterNotFound`."""

    def start(self, ticket: int, done: AdapterDone) -> None:
        """Call `done(ticket, digest)` once the claimed adapter is in memory and stays there, or `done(ticket, error)`:
        perhaps at once, on any thread."""

    def invocation(self, digest: str) -> tuple[int, ...]:
        """The tokens of a prompt from which on an adapter in memory acts; none: it acts everywhere."""

    def cancel(self, ticket: int) -> None:
        """Give back the claim of `ticket`, which has ended. Idempotent."""

    def check(self) -> None:
        """Raises `InvariantViolation` if the books do not balance."""

    def close(self) -> None: ...


AdapterDone = Callable[[int, str | Exception], None]
"""Called with a ticket and the digest of its adapter, or why there is none."""
