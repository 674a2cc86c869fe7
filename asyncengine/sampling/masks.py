"""Grammar masks of a step: filled on a thread of their own while the forward pass runs, applied once to all rows.

The matchers' libraries release the interpreter lock while they fill, so masks cost a step only what they take longer
than the forward (vLLM fills them under `execute_model` as well). That holds for a row whose last token is still being
sampled by the step before: its mask is filled when that token is here, while this step's forward runs.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.device.transfer import upload
from asyncengine.step import Batch, Row

_PART_ELEMENTS = 2**24
"""Logits masked at once: bounds the working memory at some 200 MB."""


@dataclass(slots=True, eq=False)
class AwaitedToken:
    """A constrained row's token on its way to its matcher."""

    resolve: Callable[[], object] | None
    """Returns when the matcher has been told. None: it has been."""
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

    def __init__(self, rows: dict[int, Row], awaited: dict[int, AwaitedToken], words: int, pinned: bool) -> None:
        """`rows` by batch index; `awaited`: what the mask of a row in flight waits for, by batch index."""
        self._rows = rows
        self._awaited = awaited
        self._void: dict[int, None] = {}
        self._sizes = [1 + len(row.drafts) for row in rows.values()]
        self._filled: dict[int, int] = {}
        """Masks of each row that were filled, by batch index."""
        # zeroed: a matcher sets what is allowed, and the last word has bits beyond the vocabulary
        self._packed = torch.zeros(sum(self._sizes), words, dtype=torch.int32, pin_memory=pinned)
        self._failed: dict[int, str] = {}
        self._done = threading.Event()

    def fill(self) -> None:
        try:
            masks: NDArray[np.int32] = self._packed.numpy()
            begin = 0
            for size, (index, row) in zip(self._sizes, self._rows.items(), strict=True):
                self._fill_row(masks[begin : begin + size], index, row)
                begin += size
        except Exception as error:
            self._failed = dict.fromkeys(self._rows, grammar_failed(error))
        finally:
            self._done.set()  # whoever waits must not wait for ever

    def _fill_row(self, masks: NDArray[np.int32], index: int, row: Row) -> None:
        assert row.grammar is not None
        try:
            if (token := self._awaited.get(index)) is not None:
                if (resolve := token.resolve) is not None:
                    resolve()
                if not token.confirmed:
                    self._void[index] = None
                    return
            if row.drafts:
                self._filled[index] = row.grammar.fill_along(masks, row.drafts)
            else:
                row.grammar.fill_mask(masks[0])
                self._filled[index] = 1
        except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
            self._failed[index] = grammar_failed(error)

    def wait(self, sampling: Sequence[int]) -> FilledMasks:
        """The masks, in the order of the sampled tokens, each given by the batch index of its row."""
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
        packed = self._packed if len(kept) == len(self._packed) else self._packed[kept]
        return FilledMasks(places, packed, errors, [first[index] for index in self._void])


class MaskFiller:
    """The thread that fills masks. It starts with the first constrained row and is gone after `close`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words = -(-vocab_size // 32)
        self._pinned = device.type == "cuda"
        self._jobs: queue.SimpleQueue[StepMasks | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, batch: Batch, awaited: Mapping[int, AwaitedToken]) -> StepMasks | None:
        """Begin with the masks of `batch`'s sampling rows; None if no row has a grammar.

        `awaited`, by slot: the last token launched for it.
        """
        rows = {index: row for index, row in enumerate(batch.rows) if row.grammar is not None and row.samples}
        if not rows:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="asyncengine-masks", daemon=True)
            self._thread.start()
        in_flight = {index: awaited[row.slot] for index, row in rows.items() if row.in_flight}
        masks = StepMasks(rows, in_flight, self._words, self._pinned)
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
    """Set what is not allowed to -inf, in place. logits float [rows, vocab]; many masked rows in one operation."""
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
