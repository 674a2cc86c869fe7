"""A smaller model that guesses for a larger one of the same vocabulary (speculative decoding, Leviathan et al. 2023).

It draws as the larger one will, with the same parameters and the same noise of each position: where the two
distributions are alike they pick the same token, also at temperature 1. Its keys and values lie in a pool of its own
under the larger one's page numbers, so the scheduler knows nothing of it. A row says how many guesses it wants
(`step.OPEN`), and gets as many as there are, perhaps none: guesses end where they get unsure, by the probabilities that
the smaller model gives them.

It computes nothing for requests that are not guessed for. One that is first catches up with its prompt, a part in each
step, so that no step of others waits long for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from asyncengine.request_spec import RequestSpec
from asyncengine.seams import Executor
from asyncengine.step import DRAFT_CATCH_UP, Batch, Row


@dataclass(slots=True, eq=False)
class _Guessing:
    """One row's share of the work."""

    row: Row
    """The row as it was asked for."""
    tokens: list[int]
    """Known tokens, and the guesses behind them."""
    known: int
    """Number of known tokens."""
    begin: int
    """The first position that is to be computed now."""
    end: int
    """Number of tokens with all guesses that are wanted."""
    spec: RequestSpec
    chance: float = 1.0
    """That all guesses are right, going by the probabilities that the smaller model gives them."""


class DraftPages:
    """The number of first positions of each page for which the draft model has keys and values.

    It computes nothing while nobody asks it, so its pages fall behind: a page holds what it should up to some position.
    Nobody tells it that a page changed hands; that is seen when the model that owns the page writes into it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._size = page_size
        self._held = [0] * num_pages
        self._empty = True
        """True until something is written: each step of a model that is never asked would look through its rows."""

    def overwritten(self, rows: Iterable[Row]) -> None:
        """`rows` are about to write into the first pool: from there on nothing holds."""
        if self._empty:
            return
        size, held = self._size, self._held
        for row in rows:
            number, offset = divmod(row.start, size)
            page = row.pages[number]
            held[page] = min(held[page], offset)
            for page in row.pages[number + 1 : -(-(row.start + row.num_scheduled) // size)]:
                held[page] = 0

    def first_missing(self, pages: Sequence[int], end: int) -> int:
        """The first position below `end` that is not there; `end` if none is missing."""
        size, held = self._size, self._held
        for number, page in enumerate(pages[: -(-end // size)]):
            if held[page] < size:
                return min(end, number * size + held[page])
        return end

    def written(self, pages: Sequence[int], begin: int, end: int) -> None:
        """Positions [begin, end) are there, and all before them."""
        self._empty = False
        size, held = self._size, self._held
        for number in range(begin // size, -(-end // size)):
            page = pages[number]
            held[page] = max(held[page] if number * size < begin else 0, min(size, end - number * size))


class DraftModel:
    """Fills in the guesses of rows. Used by one thread at a time, that of the steps."""

    def __init__(
        self, executor: Executor, max_model_len: int, catch_up: int = DRAFT_CATCH_UP, least_chance: float = 0.0
    ) -> None:
        """`executor` runs the smaller model, over as many pages of the same size as the larger one has.
        `max_model_len`: positions that it knows. `catch_up`: see `DRAFT_CATCH_UP`. `least_chance`: that the guesses
        so far are right; below it there are no further ones (`step_times.least_chance`)."""
        self._executor = executor
        self._most = max_model_len
        self._catch_up = catch_up
        self._least = least_chance
        self._pages = DraftPages(executor.num_pages, executor.page_size)
        self._specs: WeakKeyDictionary[RequestSpec, RequestSpec] = WeakKeyDictionary()
        """The specification by which a request's guesses are drawn, by its own."""

    def close(self) -> None:
        """Free the smaller model. Idempotent."""
        self._executor.close()

    def forget(self) -> None:
        """Nothing that it has computed is there any more."""
        self._pages = DraftPages(self._executor.num_pages, self._executor.page_size)

    def guess(self, batch: Batch) -> Batch:
        """`batch` as it is to be computed, its open guesses filled in."""
        self._pages.overwritten(batch.rows)
        if not any(row.awaits_drafts for row in batch.rows):
            return batch
        rows, work = list(batch.rows), dict[int, _Guessing]()
        claimed = set[int]()
        for index, row in enumerate(rows):
            if row.awaits_drafts:
                known = row.start + row.num_scheduled - len(row.drafts)
                begin = self._pages.first_missing(row.pages, known)
                first = row.pages[begin // self._executor.page_size]
                # somebody's prompt may also be another's: it will be there in the next step
                end = known if first in claimed else min(known + len(row.drafts), self._most)
                claimed.add(first)
                work[index] = _Guessing(row, row.tokens[:known], known, begin, end, self._plain(row.spec))
        self._draft([each for each in work.values() if each.known < each.end])
        for index, each in work.items():
            guesses = tuple(each.tokens[each.known :])
            rows[index] = each.row._replace(num_scheduled=len(each.tokens) - each.row.start, drafts=guesses)
        return batch._replace(rows=tuple(rows))

    def _plain(self, spec: RequestSpec) -> RequestSpec:
        """The specification with everything that matters for a draw; of scores only the drawn token's, which says when
        to stop."""
        plain = self._specs.get(spec)
        if plain is None:
            params = replace(
                spec.params, logprobs=True, logprobs_of="model", top_logprobs=0, prompt_logprobs=False,
                prompt_logprobs_start=0, return_routed_experts=False, routed_experts_start=0,
            )  # fmt: skip
            plain = self._specs[spec] = replace(spec, params=params)
        return plain

    def _draft(self, work: list[_Guessing]) -> None:
        """Round by round, one more guess for each that wants one."""
        while work:
            rows = tuple(self._row(each) for each in work)
            result = self._executor.launch(Batch(0, rows)).wait()
            left: list[_Guessing] = []
            for index, (each, row) in enumerate(zip(work, rows, strict=True)):
                token = result.tokens[index]
                if index in result.errors or (row.samples and token < 0):
                    continue
                each.begin = row.start + row.num_scheduled
                self._pages.written(row.pages, row.start, each.begin)
                if row.samples:
                    each.tokens.append(token)
                    each.chance *= math.exp(result.logprobs[index][-1].logprob)
                    sure = each.chance >= self._least
                    if sure and len(each.tokens) < each.end and token not in each.spec.stop_ids:
                        left.append(each)
            work = left

    def _row(self, each: _Guessing) -> Row:
        end = min(len(each.tokens), each.begin + self._catch_up)
        row, begin = each.row, each.begin
        samples = end == len(each.tokens)
        return Row(each.spec, row.slot, begin, end - begin, each.tokens, False, row.pages, samples)
