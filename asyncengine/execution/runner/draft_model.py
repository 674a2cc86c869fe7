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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.layers.recorded import GREEDY
from asyncengine.execution.layers.step import Traces
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.runner.step_inputs import StepInputs, inputs_of
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.options import WeightSource
from asyncengine.request_spec import RequestSpec
from asyncengine.seams import Executor
from asyncengine.step import DRAFT_CATCH_UP, MEASURED_SIZES, Batch, Row, sampling_places

if TYPE_CHECKING:
    from asyncengine.execution.runner.model_runner import ModelRunner


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


def least_chance(costs: Sequence[float], draft_costs: Sequence[float]) -> float:
    """The chance of all its guesses being right below which a draft model should stop guessing.

    One more guess brings a token with that chance at most, and costs a step of the draft model and a place in the
    verifying step. Both arguments are seconds of steps of `MEASURED_SIZES` tokens.
    """
    place = max(0.0, costs[-2] - costs[0]) / (MEASURED_SIZES[-2] - MEASURED_SIZES[0])
    return min(1.0, (draft_costs[0] + place) / costs[0])


class DraftModel:
    """Fills in the guesses of rows. Used by one thread at a time, that of the steps."""

    def __init__(
        self, executor: Executor, max_model_len: int, catch_up: int = DRAFT_CATCH_UP, least_chance: float = 0.0
    ) -> None:
        """`executor` runs the smaller model, over as many pages of the same size as the larger one has.
        `max_model_len`: positions that it knows. `catch_up`: see `DRAFT_CATCH_UP`. `least_chance`: see `use`."""
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

    def use(self, least_chance: float) -> None:
        """Guess from now on. `least_chance`: that the guesses so far are right; below it there are no further ones
        (`least_chance`)."""
        self._least = least_chance

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """The same as `Executor.prepare_update`."""
        return self._executor.prepare_update(weights, config, partial)

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        """The same as `Executor.prepare_release`; nothing in a cache that is released counts as computed."""
        release = self._executor.prepare_release(weights, cache)

        def run() -> None:
            release()
            if cache:
                self._pages = DraftPages(self._executor.num_pages, self._executor.page_size)

        return run

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
                spec.params, logprobs=True, logprobs_of="model", top_logprobs=0, logprob_token_ids=(),
                prompt_logprobs=False, prompt_logprobs_start=0, return_routed_experts=False, routed_experts_start=0,
                return_hidden_states=(),
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


# Guesses of the model's own head (`models.decoder_layer`), in the steps of the model itself.
#
# Every step has the head keep what it needs of the tokens that it computes, beside the keys and values of the layers:
# so it is always ready, and knows what the pages know. The hidden states of the last positions of each row are kept
# from step to step, as the next row's first token needs the one before it; one is missing behind a prefix that was
# found in the cache, where zeros take its place. None of this changes a token: guesses are checked like all others.


@dataclass(slots=True)
class _HeadGuess:
    """One row's share of the work."""

    index: int
    """The row's place in the batch."""
    row: Row
    hidden: torch.Tensor
    """[width] of the position before the newest token."""
    guesses: tuple[int, ...] = ()
    chance: float = 1.0
    """That all guesses are right, going by the probabilities that the head gives them."""


def cycled_pages(count: int, num_pages: int) -> list[int]:
    """Numbers of `count` pages for a measured row, which is never read: the pool's, repeated where it has fewer.
    Page 0 is padding."""
    return [1 + index % (num_pages - 1) for index in range(count)]


class MTPGuesser:
    """Fills in the guesses of rows (`seams.Guesser`), and computes steps such that it can. One thread at a time."""

    def __init__(self, runner: ModelRunner, model: Decoder, max_num_seqs: int) -> None:
        self._runner, self._model = runner, model
        self._kept: list[tuple[ref[RequestSpec], int, torch.Tensor] | None] = [None] * max_num_seqs
        """The request of each slot, a position of it, and the hidden states from there on [positions, width]."""
        self._least = 0.0

    def time_round(self, count: int) -> float:
        """Seconds of a round of `count` tokens."""
        began, size = time.perf_counter(), self._runner.page_size
        pages = cycled_pages(-(-(count + 1) // size), self._runner.num_pages)
        row = Row(RequestSpec(0, (0,), GREEDY, count + 2), 0, 1, count, [0] * (count + 1), False, pages, False)
        with self._computing():
            self.round([row], sampling_places(row._replace(drafts=(0,) * (count - 1))), self._no_hidden(count))
        return time.perf_counter() - began

    def use(self, least_chance: float) -> None:
        """Guess from now on. `least_chance`: as of `DraftModel`."""
        self._runner.cores.forget()
        self._least = least_chance

    def close(self) -> None:
        """It has nothing but the model's."""

    def forward(self, rows: Sequence[Row], inputs: StepInputs, traces: Traces | None = None) -> torch.Tensor:
        """Logits of a pass, as `ModelRunner.forward` gives them; the head keeps what it needs of it."""
        model, wanted, step = self._model, inputs.logit_rows, self._runner.context_of(inputs, traces)
        bounds = inputs.view.qo_indptr.tolist()
        whole = len(wanted) == len(inputs.ids)
        before = self._no_hidden(len(inputs.ids))
        features: torch.Tensor | None = None
        if step.adapters is None or whole:  # else the last layer's sums would be of other rows than without a head
            assert model.mtp is not None
            streams: list[torch.Tensor] = []
            hidden = model.hidden_states(inputs.ids, step, None, streams)
            features = model.mtp.features(hidden, streams)
            before[1:] = features[:-1]
            logits = model.logits(hidden if whole else hidden.index_select(0, wanted), step)
        else:
            logits = model.forward(inputs.ids, step, wanted)
        for row, begin in zip(rows, bounds, strict=False):
            known = self._before(row)
            before[begin] = 0 if known is None else known
        model.write_mtp(inputs.ids, before, step)
        for row, end in zip(rows, bounds[1:], strict=True):
            count = 1 + len(row.drafts)
            kept = None if features is None else features[end - count : end].clone()
            self._kept[row.slot] = (
                None if kept is None else (ref(row.spec), row.start + row.num_scheduled - count, kept)
            )
        return logits

    def _no_hidden(self, tokens: int) -> torch.Tensor:
        """[tokens, width] of zeros, in the place of hidden states that are not known."""
        return torch.zeros(tokens, self._model.config.width, dtype=self._model.dtype)

    def _before(self, row: Row) -> torch.Tensor | None:
        """The hidden state [width] of the position before the row's first; None: it is not known."""
        kept = self._kept[row.slot]
        if kept is None or kept[0]() is not row.spec:
            return None
        place = row.start - 1 - kept[1]
        return kept[2][place] if 0 <= place < len(kept[2]) else None

    def guess(self, batch: Batch) -> Batch:
        """`batch` as it is to be computed, its open guesses filled in."""
        rows = list(batch.rows)
        asked = [index for index, row in enumerate(rows) if row.drafts and row.awaits_drafts]
        if not asked:
            return batch
        work = []
        for index in asked:
            row = rows[index]
            known = self._before(row)
            # further tokens that are not computed yet (a grammar forced them) have no hidden states
            if known is not None and row.num_scheduled - len(row.drafts) == 1:
                work.append(_HeadGuess(index, row, known))
        made: dict[int, tuple[int, ...]] = dict.fromkeys(asked, ())
        with self._computing():
            made |= {each.index: each.guesses for each in self._guess(work)}
        for index, guesses in made.items():
            row = rows[index]
            count = row.num_scheduled - len(row.drafts) + len(guesses)
            rows[index] = row._replace(num_scheduled=count, drafts=guesses)
        return batch._replace(rows=tuple(rows))

    def _guess(self, work: list[_HeadGuess]) -> list[_HeadGuess]:
        """The same with guesses: round by round, one more for each that wants one."""
        done, left = list(work), work
        while left:
            inputs = [_input(each.row, each.guesses) for each in left]
            places = [each.row._replace(num_scheduled=1 + len(each.guesses), drafts=each.guesses) for each in left]
            tokens, chances, hidden = self.round(inputs, places, torch.stack([each.hidden for each in left]))
            following = []
            for number, (each, token) in enumerate(zip(left, tokens, strict=True)):
                each.chance *= chances[number]
                if not chances[number]:  # no token can be drawn
                    continue
                each.guesses, each.hidden = (*each.guesses, token), hidden[number]
                more = len(each.guesses) < len(each.row.drafts) and token not in each.row.spec.stop_ids
                if more and each.chance >= self._least:
                    following.append(each)
            left = following
        return done

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Within, rounds are computed."""
        runner = self._runner
        cores = runner.cores.step(torch_alone=self._model.compiled, small=runner.small)
        with torch.inference_mode(), on_device(runner.device), cores:
            yield

    def round(
        self, rows: Sequence[Row], places: Sequence[Row], before: torch.Tensor
    ) -> tuple[list[int], list[float], torch.Tensor]:
        """Run the head once over `rows`, and sample a token for each of `places`, as many as rows have tokens together.
        `before` [tokens, width]: hidden states of the positions before these. Returns (tokens, their probabilities,
        hidden states [tokens, width] to feed back)."""
        runner, model = self._runner, self._model
        step = runner.buffers.build(Batch(0, tuple(rows)), runner.last_token)
        context = runner.context_of(inputs_of(step, rows, None)[0])
        logits, hidden = model.guess(step.input_ids, before, context)
        sampled = runner.sampler.sample(places, logits, FilledMasks.none(), runner.last_token)
        own = logits.gather(1, sampled.tokens[:, None])[:, 0].float()
        chances = (own - logits.float().logsumexp(-1)).exp().nan_to_num_(0.0).tolist()
        return sampled.tokens.tolist(), chances, hidden


def _input(row: Row, guesses: tuple[int, ...]) -> Row:
    """The row's newest token, or the last of the `guesses` behind it, alone."""
    return row._replace(
        start=row.start + len(guesses), num_scheduled=1, samples=False, drafts=guesses[-1:], adapter_slot=0, state=None,
        window=None,
    )  # fmt: skip
