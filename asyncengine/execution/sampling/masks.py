"""Grammar masks of a step: filled while the forward pass runs, applied once to all rows.

The matchers' libraries release the interpreter lock while they fill, so masks cost a step only the time by which they
exceed the forward (vLLM fills them under `execute_model` as well). This includes rows whose last token is still being
sampled by the step before: their masks are filled when that token has arrived, while this step's forward runs. If the
forward uses the host's cores, a separate thread fills one mask after the other; if it runs on a GPU, the launching
thread fills all masks at once, on all cores.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.device.transfer import upload
from asyncengine.seams import GrammarMatcher
from asyncengine.step import Batch, Row

_PART_ELEMENTS = 2**24
"""Logits masked at once: bounds the working memory at some 200 MB."""


class UnreadStep(Protocol):
    """A launched step, as masks see it."""

    def wait(self) -> object:
        """Wait until the step's tokens have been read and its matchers have accepted them."""

    def then(self, work: Callable[[], None]) -> None:
        """Run `work` when `wait` would return, on the thread that reads the tokens; at once if they have been read."""


@dataclass(slots=True, eq=False)
class AwaitedToken:
    """A constrained row's sampled token that its matcher may not have seen yet."""

    step: UnreadStep | None
    """The step that samples it. None: the matcher has accepted it."""
    confirmed: bool = False
    """Whether the matcher took exactly the sampled token and the output goes on, as later rows in flight assume."""


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """Masks of a step's sampled tokens, for those that have one."""

    samples: list[int]
    """Indices of the sampled tokens with a mask, ascending. Discarded rows have none, nor have tokens behind a draft
    that the grammar does not allow."""
    packed: torch.Tensor
    """int32 [len(samples), ceil(vocab / 32)] on the host, lowest bit first."""
    errors: dict[int, str]
    """Index of a sampled token -> why its matcher failed."""
    discarded: list[int]
    """Indices of the sampled tokens whose input token was replaced by its matcher after the row was launched."""
    kept: Sequence[int] = ()
    """Index of each sample's mask in the caller's memory, if the masks were filled there; `packed` is empty then."""

    def among(self, samples: Sequence[int]) -> FilledMasks:
        """The masks with indices into `samples`, a list of sampled tokens that includes all that have masks."""
        index_of = {sample: index for index, sample in enumerate(samples)}
        return replace(self, samples=[index_of[sample] for sample in self.samples])

    @staticmethod
    @functools.cache
    def none() -> FilledMasks:
        """The masks of steps without any; shared, never changed."""
        return FilledMasks([], torch.empty(0, 0, dtype=torch.int32), {}, [])


class StepMasks:
    """One step's masks, being filled."""

    def __init__(
        self, rows: dict[int, Row], awaited: dict[int, AwaitedToken], words: int, done: threading.Event | None = None
    ) -> None:
        """`rows` by batch index. `awaited`: by batch index, the token in flight that a row's mask waits for. `words`:
        int32 of a mask. `done`: set by the thread that fills the masks; None: `wait` fills them."""
        self._rows = rows
        self._awaited = awaited
        self._words = words
        self._void: dict[int, None] = {}
        self._sizes = [1 + len(row.drafts) for row in rows.values()]
        self._filled: dict[int, int] = {}
        """Batch index -> number of the row's masks that were filled."""
        self._packed: NDArray[np.int32] = np.empty((0, words), dtype=np.int32)
        self._failed: dict[int, str] = {}
        self._done = done
        self._together: dict[type, dict[int, tuple[int, GrammarMatcher]]] = {}
        """Matcher class -> mask index -> (batch index, matcher), for matchers that fill their masks in one call."""

    @property
    def unread(self) -> UnreadStep | None:
        """A step that some mask waits for; None: no mask waits."""
        return next((step for token in self._awaited.values() if (step := token.step) is not None), None)

    @property
    def count(self) -> int:
        """The most masks that `fill` fills."""
        return sum(self._sizes)

    def fill(self, packed: NDArray[np.int32] | None = None) -> None:
        """Fill the masks into `packed` int32 [count, words], which may be uninitialised; None: into new memory."""
        try:
            self._packed = np.empty((self.count, self._words), dtype=np.int32) if packed is None else packed
            begin = 0
            for size, (index, row) in zip(self._sizes, self._rows.items(), strict=True):
                self._fill_row(self._packed[begin : begin + size], index, row, begin)
                begin += size
            for matcher_type, waiting in self._together.items():
                matchers = {index: matcher for index, (_, matcher) in waiting.items()}
                errors: dict[int, Exception] = cast(Any, matcher_type).fill_all(self._packed, matchers)
                self._failed |= {waiting[index][0]: grammar_failed(error) for index, error in errors.items()}
        except Exception as error:
            self._failed = dict.fromkeys(self._rows, grammar_failed(error))
        finally:
            self._together.clear()
            if self._done is not None:
                self._done.set()  # also after an error, or `wait` would never return

    def _fill_row(self, masks: NDArray[np.int32], index: int, row: Row, begin: int) -> None:
        assert row.grammar is not None
        try:
            if (token := self._awaited.get(index)) is not None:
                if (step := token.step) is not None:
                    step.wait()
                if not token.confirmed:
                    self._void[index] = None
                    return
            self._filled[index] = 1
            if self._done is None and not row.drafts and hasattr(row.grammar, "fill_all"):
                self._together.setdefault(type(row.grammar), {})[begin] = index, row.grammar
                return
            masks[:] = 0  # matchers may only set bits, and the last word has bits beyond the vocabulary
            if row.drafts:
                self._filled[index] = row.grammar.fill_along(masks, row.drafts)
            else:
                row.grammar.fill_mask(masks[0])
        except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
            self._failed[index] = grammar_failed(error)

    def wait(self, sampling: Sequence[int], packed: NDArray[np.int32] | None = None) -> FilledMasks:
        """Wait for the masks, in the order of the sampled tokens. `sampling`: batch index of each sampled token's row.
        `packed`: memory to fill, as in `fill`, if no other thread fills them."""
        if self._done is None:
            self.fill(packed)
        else:
            self._done.wait()
        first = {index: sample for sample, index in reversed(list(enumerate(sampling)))}
        kept: list[int] = []
        samples: list[int] = []
        begin = 0
        for size, index in zip(self._sizes, self._rows, strict=True):
            if index not in self._void:
                # a failed row's masks are not used, but its samples must not pass for those of rows without a grammar
                count = size if index in self._failed else self._filled[index]
                kept += range(begin, begin + count)
                samples += range(first[index], first[index] + count)
            begin += size
        errors = {first[index]: text for index, text in self._failed.items()}
        discarded = [first[index] for index in self._void]
        if packed is not None:
            return FilledMasks(samples, torch.empty(0, 0, dtype=torch.int32), errors, discarded, kept)
        filled = self._packed if len(kept) == len(self._packed) else self._packed[kept]
        return FilledMasks(samples, torch.from_numpy(filled), errors, discarded)


class MaskFiller:
    """Fills masks: on a CPU in a thread, which starts with the first constrained row and ends with `close`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.words = -(-vocab_size // 32)
        """int32 words of a mask."""
        self.threaded = device.type == "cpu"
        """False: `StepMasks.wait` fills."""
        self._jobs: queue.SimpleQueue[StepMasks | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, batch: Batch, awaited: Mapping[int, AwaitedToken]) -> StepMasks | None:
        """Begin to fill the masks of `batch`'s sampling rows; None if no row has a grammar.

        `awaited`: slot -> token of the last constrained row that was launched for it.
        """
        rows = {index: row for index, row in enumerate(batch.rows) if row.grammar is not None and row.samples}
        if not rows:
            return None
        in_flight = {index: awaited[row.slot] for index, row in rows.items() if row.in_flight}
        if not self.threaded:
            return StepMasks(rows, in_flight, self.words)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="asyncengine-masks", daemon=True)
            self._thread.start()
        masks = StepMasks(rows, in_flight, self.words, threading.Event())
        self._jobs.put(masks)
        return masks

    def _work(self) -> None:
        while (masks := self._jobs.get()) is not None:
            masks.fill()

    def close(self) -> None:
        """End the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()


def apply_masks(logits: torch.Tensor, masks: FilledMasks) -> None:
    """Set the logits [rows, vocab] of tokens that are not allowed to -inf, in place."""
    device, vocab = logits.device, logits.shape[-1]
    all_rows = len(masks.samples) == logits.shape[0]
    most = max(_PART_ELEMENTS // vocab, 1)
    for begin in range(0, len(masks.packed), most):
        packed = masks.packed[begin : begin + most].view(torch.uint8).numpy()
        allowed = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
        refused = upload(allowed, device).logical_not_()
        if all_rows:
            logits[begin : begin + most].masked_fill_(refused, float("-inf"))
        else:
            index = upload(np.array(masks.samples[begin : begin + most], dtype=np.int64), device)
            logits.index_copy_(0, index, logits[index].masked_fill_(refused, float("-inf")))


def grammar_failed(error: Exception) -> str:
    return f"the grammar failed: {error}" if str(error) else f"the grammar failed: {type(error).__name__}"
