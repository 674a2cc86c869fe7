"""Grammar masks of a step: filled while the forward pass runs, applied once to all rows.

The matchers' libraries release the interpreter lock while they fill, so masks cost a step only what they take longer
than the forward (vLLM fills them under `execute_model` as well). That holds for a row whose last token is still being
sampled by the step before: its mask is filled when that token is here, while this step's forward runs. Where the
forward takes the host's cores, a separate thread fills one mask after the other; where a device computes, the
launching thread fills all masks at once, on all cores.
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
    """A launched step, as far as masks are concerned."""

    def wait(self) -> object:
        """Return when the step's tokens have been read, and matchers told."""

    def then(self, work: Callable[[], None]) -> None:
        """Do `work` at that time, on the thread that reads; now, if that time has been."""


@dataclass(slots=True, eq=False)
class AwaitedToken:
    """A constrained row's token on its way to its matcher."""

    step: UnreadStep | None
    """The step that samples it. None: the matcher has been told."""
    confirmed: bool = False
    """Then: the output has grown by the sampled token alone and goes on, as later rows were launched for."""


@dataclass(frozen=True, slots=True)
class FilledMasks:
    """Masks of the sampling rows that have one."""

    places: list[int]
    """Index among the sampled tokens, ascending. Discarded rows have none, and places behind a draft that a grammar
    does not allow."""
    packed: torch.Tensor
    """int32 [len(places), ceil(vocab / 32)] on the host, lowest bit first."""
    errors: dict[int, str]
    """Index among the sampled tokens -> why its matcher has no mask."""
    discarded: list[int]
    """Index among the sampled tokens of those whose input was not what they were launched for."""
    kept: Sequence[int] = ()
    """Index of each place's mask in the memory that was given for them; `packed` is empty then."""

    def among(self, places: Sequence[int]) -> FilledMasks:
        """The same by index among these of the tokens, which have all the masks."""
        number = {place: index for index, place in enumerate(places)}
        return replace(self, places=[number[place] for place in self.places])

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
        """`rows` by batch index; `awaited`: what the mask of a row in flight waits for, by batch index; `done`: of a
        thread that fills. None: `wait` does."""
        self._rows = rows
        self._awaited = awaited
        self._words = words
        self._void: dict[int, None] = {}
        self._sizes = [1 + len(row.drafts) for row in rows.values()]
        self._filled: dict[int, int] = {}
        """Masks of each row that were filled, by batch index."""
        self._packed: NDArray[np.int32] = np.empty((0, words), dtype=np.int32)
        self._failed: dict[int, str] = {}
        self._done = done
        self._together: dict[type, dict[int, tuple[int, GrammarMatcher]]] = {}
        """Kind of matcher -> mask -> batch index and matcher of the masks that are filled at once."""

    @property
    def unread(self) -> UnreadStep | None:
        """A step that some mask waits for."""
        return next((step for token in self._awaited.values() if (step := token.step) is not None), None)

    @property
    def count(self) -> int:
        """Masks at most."""
        return sum(self._sizes)

    def fill(self, packed: NDArray[np.int32] | None = None) -> None:
        """Fill the masks into `packed` int32 [count, words], which may hold anything; None: into new memory."""
        try:
            self._packed = np.empty((self.count, self._words), dtype=np.int32) if packed is None else packed
            begin = 0
            for size, (index, row) in zip(self._sizes, self._rows.items(), strict=True):
                self._fill_row(self._packed[begin : begin + size], index, row, begin)
                begin += size
            for kind, waiting in self._together.items():
                matchers = {place: matcher for place, (_, matcher) in waiting.items()}
                errors: dict[int, Exception] = cast(Any, kind).fill_all(self._packed, matchers)
                self._failed |= {waiting[place][0]: grammar_failed(error) for place, error in errors.items()}
        except Exception as error:
            self._failed = dict.fromkeys(self._rows, grammar_failed(error))
        finally:
            self._together.clear()
            if self._done is not None:
                self._done.set()  # whoever waits must not wait for ever

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
            masks[:] = 0  # a matcher may set what is allowed alone, and the last word has bits beyond the vocabulary
            if row.drafts:
                self._filled[index] = row.grammar.fill_along(masks, row.drafts)
            else:
                row.grammar.fill_mask(masks[0])
        except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
            self._failed[index] = grammar_failed(error)

    def wait(self, sampling: Sequence[int], packed: NDArray[np.int32] | None = None) -> FilledMasks:
        """The masks, in the order of the sampled tokens, each given by the batch index of its row. `packed`: memory to
        fill, as in `fill`, where no other thread does."""
        if self._done is None:
            self.fill(packed)
        else:
            self._done.wait()
        first = {index: place for place, index in reversed(list(enumerate(sampling)))}
        kept: list[int] = []
        places: list[int] = []
        begin = 0
        for size, index in zip(self._sizes, self._rows, strict=True):
            if index not in self._void:
                # of one that failed nothing is used, but its places must not pass for those of rows without a grammar
                count = size if index in self._failed else self._filled[index]
                kept += range(begin, begin + count)
                places += range(first[index], first[index] + count)
            begin += size
        errors = {first[index]: text for index, text in self._failed.items()}
        void = [first[index] for index in self._void]
        if packed is not None:
            return FilledMasks(places, torch.empty(0, 0, dtype=torch.int32), errors, void, kept)
        filled = self._packed if len(kept) == len(self._packed) else self._packed[kept]
        return FilledMasks(places, torch.from_numpy(filled), errors, void)


class MaskFiller:
    """Has masks filled: on a CPU by a thread, which starts with the first constrained row and is gone after `close`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.words = -(-vocab_size // 32)
        """The words of a mask."""
        self.threaded = device.type == "cpu"
        """False: `StepMasks.wait` fills."""
        self._jobs: queue.SimpleQueue[StepMasks | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, batch: Batch, awaited: Mapping[int, AwaitedToken]) -> StepMasks | None:
        """Begin with the masks of `batch`'s sampling rows; None if no row has a grammar.

        `awaited`, by slot: the last token launched for it.
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
        """Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()


def apply_masks(logits: torch.Tensor, masks: FilledMasks) -> None:
    """Set tokens that are not allowed to -inf, in place. logits float [rows, vocab]; many masked rows in one
    operation."""
    device, vocab = logits.device, logits.shape[-1]
    all_rows = len(masks.places) == logits.shape[0]
    most = max(_PART_ELEMENTS // vocab, 1)
    for begin in range(0, len(masks.packed), most):
        packed = masks.packed[begin : begin + most].view(torch.uint8).numpy()
        allowed = np.unpackbits(packed, axis=1, count=vocab, bitorder="little").view(np.bool_)
        refused = upload(allowed, device).logical_not_()
        if all_rows:
            logits[begin : begin + most].masked_fill_(refused, float("-inf"))
        else:
            index = upload(np.array(masks.places[begin : begin + most], dtype=np.int64), device)
            logits.index_copy_(0, index, logits[index].masked_fill_(refused, float("-inf")))


def grammar_failed(error: Exception) -> str:
    return f"the grammar failed: {error}" if str(error) else f"the grammar failed: {type(error).__name__}"
