"""A runner without a model that remembers: it answers from what was really written into a row's pages.

A fake that answered from the request's token list would hide the bugs that matter (a page freed too early, a stale
prefix, a wrong remap): the next token here is a hash of the tokens found in the pages, in order, so any page that
holds something else than it should changes the output. `oracle` computes what the answer must be from the tokens alone.
It may keep recurrent states as well, which are hashes of a history in slots, and the next token depends on them too;
and what windows see may lie in pages of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.images import ImageSpan
from asyncengine.kvcache.radix_tree import Lookback, Window
from asyncengine.request_spec import Pooled
from asyncengine.seams import Executor, Guesser
from asyncengine.step import (
    Batch,
    ConstrainedToken,
    FinishedStep,
    RecordType,
    Row,
    StepResult,
    TokenLogprob,
    sampling_places,
)

# Recurrent states without a model: a state is how many tokens it has taken in, and a hash of them.

State = tuple[int, int]
"""(tokens taken in, their hash)"""

FIRST: State = (0, 0x811C9DC5)  # FNV-1a's offset; `after` has its prime
LOST: State = (-1, 0)


def after(state: State, tokens: Sequence[int]) -> State:
    """The state `state` becomes by `tokens`."""
    count, value = state
    for token in tokens:
        value = ((value ^ (token + 1)) * 0x100000001B3 + 1) & 0xFFFFFFFFFFFFFFFF
    return count + len(tokens), value


class FakeStates:
    """Slots of states. `strict`: False checks nothing here, so that faults show in the tokens alone."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[State | None] = [FIRST, *[None] * (num_slots - 1)]
        self.strict = True

    def advance(self, rows: Sequence[Row], context: Callable[[Row], list[int]], lost: Sequence[int] = ()) -> None:
        """One step. `context`: the tokens that a row attends to, those it computes included. `lost`: rows whose
        states become undefined, as do those that build on them."""
        if self.strict:
            self._check(rows)
        states = [self._read(row) for row in rows]  # rows may run in any order: all read what was there before
        for index, (row, before) in enumerate(zip(rows, states, strict=True)):
            tokens, use = context(row), row.state
            assert use is not None
            if index in lost or before == LOST:
                for slot in _written(row):
                    self.slots[slot] = LOST
                continue
            if self.strict and before != after(FIRST, tokens[: row.start]):
                raise AssertionError(
                    f"row {row.spec.ticket} starts at {row.start}, but slot {use.source} holds {before}"
                )
            first_draft = len(tokens) - len(row.drafts)
            between = list(zip(range(first_draft, len(tokens)), use.guesses, strict=False))
            for position, slot in (*use.saves, *between, (len(tokens), use.slot)):
                self.slots[slot] = after(before, tokens[row.start : position])

    def difference(self, row: Row, tokens: Sequence[int], accepted: int = 0) -> int:
        """0 if the state after `row` with `accepted` of its drafts is that of `tokens`; else a number that depends on
        the actual state."""
        assert row.state is not None
        between = accepted < len(row.drafts)
        count, value = self.slots[row.state.guesses[accepted] if between else row.state.slot] or FIRST
        expected = after(FIRST, tokens)
        return (value ^ expected[1]) + abs(count - expected[0])

    def _read(self, row: Row) -> State:
        if row.state is None:
            raise AssertionError(f"row {row.spec.ticket} says nothing of its state")
        return self.slots[row.state.source] or FIRST

    def _check(self, rows: Sequence[Row]) -> None:
        writers: dict[int, int] = {}
        for row in rows:
            use = row.state
            assert use is not None
            ticket, at = row.spec.ticket, row.start
            for position, _ in use.saves:
                if not at < position <= row.start + row.num_scheduled:
                    raise AssertionError(f"row {ticket} takes a snapshot at {position}, outside of itself")
                at = position
            if len(use.guesses) < len(row.drafts):
                raise AssertionError(f"row {ticket} has {len(row.drafts)} drafts, {len(use.guesses)} states")
            for slot in _written(row):
                if not 0 < slot < len(self.slots):
                    raise AssertionError(f"row {ticket} writes state slot {slot}")
                if slot in writers:
                    raise AssertionError(f"rows {writers[slot]} and {ticket} both write state slot {slot}")
                writers[slot] = ticket
        for row in rows:
            use = row.state
            assert use is not None
            if use.source != use.slot and use.source in writers:
                raise AssertionError(f"row {row.spec.ticket} reads state slot {use.source}, which this step writes")
            if self.slots[use.source] is None:
                raise AssertionError(f"row {row.spec.ticket} reads state slot {use.source}, which nobody wrote")


def _written(row: Row) -> tuple[int, ...]:
    assert row.state is not None
    return (row.state.slot, *(slot for _, slot in row.state.saves), *row.state.guesses)


EMPTY = -1


def content(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Sequence[int]:
    """`tokens` with a hash of each picture's content in the place of its ids, as a model sees the content."""
    if not images:
        return tokens
    result = list(tokens)
    for span in images:
        for index in range(span.length):
            identity = span.image.digest + (span.offset + index).to_bytes(4)
            result[span.first + index] = int.from_bytes(hashlib.blake2b(identity, digest_size=7).digest())
    return result


class FakeModel:
    """A "language model": the next token is a pure function of all tokens so far, and of the seed when sampling.

    With `windows`, one of how many there are and of those that the last one sees; where some layers have none, of all
    and, apart from them, of those that the last one sees by windows.
    """

    def __init__(
        self, vocab_size: int = 97, eos: int = 1, eos_every: int = 0, windows: tuple[Window, ...] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.eos = eos
        self.eos_every = eos_every
        """About one token in so many is `eos`; 0: never."""
        self.weights = 0
        """Stands for its weights: another number, another model."""
        self.windows = windows
        self.lookback = Lookback.of(windows)
        self.near = Lookback.of(window for window in windows if any(window))

    def first_seen(self, position: int) -> int:
        return 0 if self.lookback is None else self.lookback.first(position)

    def first_near(self, position: int) -> int:
        """The first that a layer with a window sees."""
        return 0 if self.near is None else self.near.first(position)

    def next_token(self, tokens: Sequence[int], seed: int = 0, near: Sequence[int] | None = None) -> int:
        """`near`: the same tokens as layers with windows know them, where their pages are others."""
        state = ((seed + 31 * self.weights) * 0x9E3779B97F4A7C15 + len(tokens)) & 0xFFFFFFFFFFFFFFFF
        for token in islice(tokens, self.first_seen(len(tokens) - 1), None):
            state = ((state ^ (token + 1)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        if self.near is not None and self.lookback is None:
            for token in islice(tokens if near is None else near, self.first_near(len(tokens) - 1), None):
                state = ((state ^ (token + 7)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
        if self.eos_every and (state >> 7) % self.eos_every == 0:
            return self.eos
        return 2 + (state >> 11) % (self.vocab_size - 2)

    def oracle(self, prompt: Sequence[int], max_tokens: int, seed: int = 0, stop_ids: Sequence[int] = ()) -> list[int]:
        """The one right output for `prompt`."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(self.next_token(tokens, seed))
            if tokens[-1] in stop_ids:
                break
        return tokens[len(prompt) :]


def fake_vector(tokens: Sequence[int], pooled: Pooled, width: int = 1) -> NDArray[np.float32]:
    """The one right vector of a text: whole numbers that float32 holds, which depend on all that `pooled` says."""
    state = len(tokens) * 31 + pooled.skip * 7 + pooled.second
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return np.array([(state >> (7 * index)) % 2**20 for index in range(width)], dtype=np.float32)


class FakeExecutor(Executor):
    """An `Executor` with KV memory made of plain integers.

    Checks what a device would not: that a row computes something, that its pages are real, not page 0, not shared with
    another row that writes to them in the same step, and that everything it attends to has been written. A violation
    raises. `num_states`: slots for recurrent states, slot 0 included; 0: the model keeps none.
    """

    def __init__(
        self, num_pages: int = 64, page_size: int = 16, model: FakeModel | None = None, num_states: int = 0,
        width: int = 1, num_window_pages: int = 0,
    ) -> None:  # fmt: skip
        """`width`: numbers of a vector, for requests that ask for one. `num_window_pages`: pages of layers with
        windows, page 0 included; 0: all layers have the same."""
        self.width = width
        self._counted: dict[int, list[int]] = {}
        """Slot -> tokens computed so far, of texts to be pooled whose every position counts."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_states = num_states
        self.num_window_pages = num_window_pages
        self.states = FakeStates(num_states) if num_states else None
        self.model = model or FakeModel()
        self.windows = self.model.windows
        self.memory = [[EMPTY] * page_size for _ in range(num_pages)]
        self.window_memory = [[EMPTY] * page_size for _ in range(num_window_pages)]
        self.encoded: dict[bytes, None] = {}
        """Digests of the pictures that are in memory."""
        self.last_token: dict[int, int] = {}
        self.confirmed: dict[int, bool] = {}
        """Slot -> whether its last constrained row's output grew by the sampled token alone and goes on."""
        self.executed: list[Batch] = []
        self.keep_batches = False
        self.fail_tickets: dict[int, str] = {}
        """Ticket -> error: rows that fail as data."""
        self.lose: Callable[[Row], bool] = lambda row: False
        """Rows that lose their states in a step that has not enough memory: those that move it where it lies."""
        self.draft_model: Guesser | None = None
        """The model that makes guesses that are left open."""
        self.closed = False

    def update(self, weights: int) -> None:
        """Give the model other weights. Pages and states of the old ones count as unwritten."""
        self.model.weights = weights
        self.memory = [[EMPTY] * self.page_size for _ in range(self.num_pages)]
        self.window_memory = [[EMPTY] * self.page_size for _ in range(self.num_window_pages)]
        if self.states is not None:
            self.states.slots[1:] = [None] * (self.num_states - 1)

    def launch(self, batch: Batch) -> FinishedStep:
        return FinishedStep(self.execute(batch))

    def execute(self, batch: Batch) -> StepResult:
        """Compute one step. Subclasses change this."""
        if self.keep_batches:
            self.executed.append(batch)
        if self.draft_model is not None:
            batch = self.draft_model.guess(batch)
        if batch.encode is not None:
            for digest in batch.encode.dropped:
                self.encoded.pop(digest, None)
            self.encoded[batch.encode.image.digest] = None
        self._write(batch)
        result = StepResult(batch.step, [-1] * len(batch.rows))
        if self.states is not None:
            result.lost = [index for index, row in enumerate(batch.rows) if row.moves_state and self.lose(row)]
            self.states.advance(batch.rows, self.context, result.lost)
        for index, row in enumerate(batch.rows):
            if index in result.lost:
                self.last_token.setdefault(row.slot, 0)
            elif row.spec.ticket in self.fail_tickets:
                result.errors[index] = self.fail_tickets[row.spec.ticket]
                self.last_token.setdefault(row.slot, 0)  # any token: a step that is launched already reads it
                self.confirmed[row.slot] = False
            elif row.spec.pooled is not None:
                vector = self._pool(row, row.spec.pooled)
                result.vectors.update({} if vector is None else {index: vector})
            elif row.samples:
                self.sample(index, row, result)
        return result

    def _write(self, batch: Batch) -> None:
        """All rows write before any reads, as one forward pass does layer by layer."""
        for type_, source, page in batch.copies:
            memory = self.memory if type_ is RecordType.PAGE else self.window_memory
            memory[page] = list(memory[source])
        written: dict[tuple[int, int], int] = {}
        near: dict[tuple[int, int], int] = {}
        for row in batch.rows:
            if row.num_scheduled < 1:
                raise AssertionError(f"row {row.spec.ticket} computes nothing: a model has no logits to sample from")
            if row.spec.whole:
                continue
            self._check_images(row)
            tokens = content(row.tokens, row.spec.images)
            if (row.window is not None) != bool(self.num_window_pages):
                raise AssertionError(f"row {row.spec.ticket} has other pages than the model's layers")
            for position in range(row.start, row.start + row.num_scheduled):
                last = position == row.start + row.num_scheduled - 1
                in_flight = row.in_flight and last
                first_draft = row.start + row.num_scheduled - len(row.drafts)
                if position >= first_draft:
                    token = row.drafts[position - first_draft]
                else:
                    token = self.last_token[row.slot] if in_flight else tokens[position]
                self._put_token(self.memory, row.pages, 0, position, token, written, row)
                if row.window is not None:
                    self._put_token(self.window_memory, row.window.pages, row.window.first, position, token, near, row)

    def _check_images(self, row: Row) -> None:
        end = row.start + row.num_scheduled
        for span in row.spec.images:
            if span.end <= row.start or span.first >= end:
                continue
            if span.image.digest not in self.encoded:
                raise AssertionError(f"row {row.spec.ticket} computes a picture that is not encoded")
            if span.whole and end < span.end:
                raise AssertionError(f"row {row.spec.ticket} cuts a picture that must be whole")

    def _put_token(
        self, memory: list[list[int]], pages: Sequence[int], first: int, position: int, token: int,
        written: dict[tuple[int, int], int], row: Row,
    ) -> None:  # fmt: skip
        """`first`: the page that pages[0] stands for. `written`: what has been in this step, and for whom."""
        page, offset = _page_at(pages, first, position // self.page_size), position % self.page_size
        if not 0 < page < len(memory):
            raise AssertionError(f"row {row.spec.ticket} writes to page {page}")
        if (page, offset) in written:
            raise AssertionError(f"rows {written[page, offset]} and {row.spec.ticket} both write page {page}")
        written[page, offset] = row.spec.ticket
        memory[page][offset] = token

    def context(self, row: Row) -> list[int]:
        """The tokens that `row` attends to, as its pages hold them; 0 for those that none of it sees."""
        return self._read(self.memory, row.pages, 0, self.model.first_seen(row.start), row)

    def near(self, row: Row) -> list[int] | None:
        """The tokens that layers with windows attend to, as their own pages hold them; None: they have none."""
        if row.window is None:
            return None
        first = self.model.first_near(row.start)
        return self._read(self.window_memory, row.window.pages, row.window.first, first, row)

    def _read(self, memory: list[list[int]], pages: Sequence[int], first: int, seen: int, row: Row) -> list[int]:
        size = self.page_size
        tokens = [0] * seen
        for position in range(seen, row.start + row.num_scheduled):
            tokens.append(memory[_page_at(pages, first, position // size)][position % size])
        if EMPTY in tokens:
            raise AssertionError(f"row {row.spec.ticket} reads position {tokens.index(EMPTY)}, which nobody wrote")
        return tokens

    def _pool(self, row: Row, pooled: Pooled) -> NDArray[np.float32] | None:
        """The vector of a text; None: more of it is to come. Checks that a whole text comes at once and has no pages,
        and that of one whose every position counts none was taken from the cache."""
        if pooled.whole:
            if row.start or row.num_scheduled != row.spec.prompt_len or row.pages:
                raise AssertionError(
                    f"row {row.spec.ticket}: a text that is computed whole came in parts or with pages"
                )
            return fake_vector(row.tokens, pooled, self.width)
        tokens = self.context(row)
        if pooled.every:
            if row.start == 0:
                self._counted[row.slot] = []
            seen = self._counted.setdefault(row.slot, [])
            if len(seen) != row.start:
                raise AssertionError(f"row {row.spec.ticket}: position {len(seen)} was not computed, and counts")
            seen += tokens[row.start :]
            tokens = seen
        return fake_vector(tokens, pooled, self.width) if row.samples else None

    def sample(self, index: int, row: Row, result: StepResult) -> None:
        """Put the tokens of `row`, which is batch.rows[index], into `result`. Subclasses change this, too."""
        if row.grammar is not None:
            if row.in_flight and not self.confirmed[row.slot]:
                return  # discarded
            self.confirmed[row.slot] = False
        produced: list[int] = []
        scored: list[TokenLogprob] = []
        effect = ConstrainedToken(False, False, None)
        for sampling_row in sampling_places(row):
            if len(produced) != len(sampling_row.drafts):
                continue  # the grammar forced what was guessed here
            context = self.context(sampling_row)
            wrong = 0 if self.states is None else self.states.difference(row, context, len(sampling_row.drafts))
            token = self.model.next_token(context, row.spec.seed ^ wrong, self.near(sampling_row))
            forced: list[int] = []
            if row.grammar is not None:
                try:
                    sampled = self.constrain(row.grammar, token)
                    others = partial(self.allowed, row.grammar, token)
                    token, *forced = row.grammar.accept(sampled, not row.spec.params.logprobs, others)
                except Exception as error:
                    result.errors[index] = f"the grammar failed: {error}"
                    self.last_token.setdefault(row.slot, 0)
                    return
                effect = ConstrainedToken(
                    token != sampled, row.grammar.is_terminated(), row.grammar.steered_from, effect.forced + len(forced)
                )
            produced += [token, *forced]
            scored.append(TokenLogprob(token, -float(token) / self.model.vocab_size))
            if effect.complete or produced != list(row.drafts[: len(produced)]):
                break
        result.put(index, row, produced)
        self.last_token[row.slot] = produced[0]
        if row.grammar is not None:
            result.constrained[index] = effect
            self.confirmed[row.slot] = not (effect.replaced or effect.complete or len(produced) > 1)
        if row.spec.params.logprobs:
            result.logprobs[index] = scored

    def constrain(self, grammar: Any, token: int) -> int:
        """The first allowed token from `token` upwards, in a circle."""
        if not (allowed := self.allowed(grammar, token)):
            raise AssertionError("the grammar allows no token")
        return allowed[0]

    def allowed(self, grammar: Any, token: int) -> list[int]:
        """All allowed tokens, from `token` upwards, in a circle."""
        mask = np.zeros(-(-self.model.vocab_size // 32), dtype=np.int32)
        grammar.fill_mask(mask)
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=self.model.vocab_size, bitorder="little"))
        return [int(token_id) for token_id in np.roll(ids, -int(np.searchsorted(ids, token)))]

    def close(self) -> None:
        self.closed = True


def _page_at(pages: Sequence[int], first: int, index: int) -> int:
    if index < first:
        raise AssertionError(f"page {index} is read, which has been given back: {first} is the first")
    return pages[index - first]
