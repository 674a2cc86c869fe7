"""A smaller model that guesses for a larger one of the same vocabulary (speculative decoding, Leviathan et al. 2023).

It samples as the larger one will, with the same parameters and the same noise at each position: where the two
distributions are alike they pick the same token, also at temperature 1. Its keys and values lie in a second pool under
the larger model's page numbers, so the scheduler knows nothing of it. A row asks for a number of guesses
(`step.OPEN`), and gets that many or fewer: guessing stops once the product of the draft model's probabilities is low.

Requests without speculation cost it nothing. For others it first catches up with the prompt, a chunk in each step, so
that no step of other requests waits long for it.
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
class _RowDraft:
    """Drafting state of one row."""

    row: Row
    """The row as the scheduler asked for it."""
    tokens: list[int]
    """Known tokens, followed by the guesses so far."""
    known: int
    """Number of known tokens."""
    begin: int
    """The next position that the draft model computes."""
    end: int
    """Number of tokens once all wanted guesses are made."""
    spec: RequestSpec
    chance: float = 1.0
    """Product of the draft model's probabilities of the guesses."""


class DraftPages:
    """For each page, the number of leading positions whose keys and values the draft model has computed.

    The draft model computes only for speculating rows, so its pages fall behind the larger model's. A page that gets
    another request needs no message: the larger model's write into it resets the count here."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._size = page_size
        self._valid = [0] * num_pages
        self._empty = True
        """True until the first write, so that steps of a model without speculation skip the loop over their rows."""

    def overwritten(self, rows: Iterable[Row]) -> None:
        """Invalidate the positions that `rows` are about to write in the larger model's pool, and those behind them."""
        if self._empty:
            return
        size, valid = self._size, self._valid
        for row in rows:
            number, offset = divmod(row.start, size)
            page = row.pages[number]
            valid[page] = min(valid[page], offset)
            for page in row.pages[number + 1 : -(-(row.start + row.num_scheduled) // size)]:
                valid[page] = 0

    def first_missing(self, pages: Sequence[int], end: int) -> int:
        """The first position below `end` that is not computed; `end` if all are."""
        size, valid = self._size, self._valid
        for number, page in enumerate(pages[: -(-end // size)]):
            if valid[page] < size:
                return min(end, number * size + valid[page])
        return end

    def written(self, pages: Sequence[int], begin: int, end: int) -> None:
        """Note that positions [begin, end) are computed; all before them were already."""
        self._empty = False
        size, valid = self._size, self._valid
        for number in range(begin // size, -(-end // size)):
            page = pages[number]
            valid[page] = max(valid[page] if number * size < begin else 0, min(size, end - number * size))


def least_chance(costs: Sequence[float], draft_costs: Sequence[float]) -> float:
    """The probability of all guesses being right below which one more guess does not pay.

    One more guess brings a token with at most that probability, and costs a pass of the draft model and one more token
    in the verifying step. Both arguments are seconds of steps of `MEASURED_SIZES` tokens.
    """
    row_cost = max(0.0, costs[-2] - costs[0]) / (MEASURED_SIZES[-2] - MEASURED_SIZES[0])
    return min(1.0, (draft_costs[0] + row_cost) / costs[0])


class DraftModel:
    """Fills in the guesses of rows. Used by one thread at a time, that of the steps."""

    def __init__(
        self, executor: Executor, max_model_len: int, catch_up: int = DRAFT_CATCH_UP, least_chance: float = 0.0
    ) -> None:
        """`executor` runs the smaller model, over as many pages of the same size as the larger one has.
        `max_model_len`: its context length. `catch_up`: see `DRAFT_CATCH_UP`. `least_chance`: see `use`."""
        self._executor = executor
        self._most = max_model_len
        self._catch_up = catch_up
        self._least = least_chance
        self._pages = DraftPages(executor.num_pages, executor.page_size)
        self._specs: WeakKeyDictionary[RequestSpec, RequestSpec] = WeakKeyDictionary()
        """Request's specification -> the one by which its guesses are sampled."""

    def close(self) -> None:
        """Free the smaller model. Idempotent."""
        self._executor.close()

    def use(self, least_chance: float) -> None:
        """Guess from now on, as long as the guesses are all right with probability `least_chance` at least (see the
        function of that name)."""
        self._least = least_chance

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        """The same as `Executor.prepare_update`."""
        return self._executor.prepare_update(weights, config, partial)

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        """The same as `Executor.prepare_release`; after a release of the cache no position counts as computed."""
        release = self._executor.prepare_release(weights, cache)

        def run() -> None:
            release()
            if cache:
                self._pages = DraftPages(self._executor.num_pages, self._executor.page_size)

        return run

    def guess(self, batch: Batch) -> Batch:
        """`batch` with its open drafts replaced by guesses, as it is to be computed."""
        self._pages.overwritten(batch.rows)
        if not any(row.awaits_drafts for row in batch.rows):
            return batch
        rows, work = list(batch.rows), dict[int, _RowDraft]()
        claimed = set[int]()
        for index, row in enumerate(rows):
            if row.awaits_drafts:
                known = row.start + row.num_scheduled - len(row.drafts)
                begin = self._pages.first_missing(row.pages, known)
                first = row.pages[begin // self._executor.page_size]
                # requests may share prompt pages: one row computes them, the others guess from the next step on
                end = known if first in claimed else min(known + len(row.drafts), self._most)
                claimed.add(first)
                work[index] = _RowDraft(row, row.tokens[:known], known, begin, end, self._plain(row.spec))
        self._draft([draft for draft in work.values() if draft.known < draft.end])
        for index, draft in work.items():
            guesses = tuple(draft.tokens[draft.known :])
            rows[index] = draft.row._replace(num_scheduled=len(draft.tokens) - draft.row.start, drafts=guesses)
        return batch._replace(rows=tuple(rows))

    def _plain(self, spec: RequestSpec) -> RequestSpec:
        """The specification reduced to what affects sampling, with the sampled token's log-probability, which decides
        when guessing stops."""
        plain = self._specs.get(spec)
        if plain is None:
            params = replace(
                spec.params, logprobs=True, logprobs_of="model", top_logprobs=0, logprob_token_ids=(),
                prompt_logprobs=False, prompt_logprobs_start=0, return_routed_experts=False, routed_experts_start=0,
                return_hidden_states=(),
            )  # fmt: skip
            plain = self._specs[spec] = replace(spec, params=params)
        return plain

    def _draft(self, work: list[_RowDraft]) -> None:
        """Make the guesses round by round, one for each unfinished row."""
        while work:
            rows = tuple(self._row(draft) for draft in work)
            result = self._executor.launch(Batch(0, rows)).wait()
            unfinished: list[_RowDraft] = []
            for index, (draft, row) in enumerate(zip(work, rows, strict=True)):
                token = result.tokens[index]
                if index in result.errors or (row.samples and token < 0):
                    continue
                draft.begin = row.start + row.num_scheduled
                self._pages.written(row.pages, row.start, draft.begin)
                if row.samples:
                    draft.tokens.append(token)
                    draft.chance *= math.exp(result.logprobs[index][-1].logprob)
                    sure = draft.chance >= self._least
                    if sure and len(draft.tokens) < draft.end and token not in draft.spec.stop_ids:
                        unfinished.append(draft)
            work = unfinished

    def _row(self, draft: _RowDraft) -> Row:
        end = min(len(draft.tokens), draft.begin + self._catch_up)
        row, begin = draft.row, draft.begin
        samples = end == len(draft.tokens)
        return Row(draft.spec, row.slot, begin, end - begin, draft.tokens, False, row.pages, samples)


# Guesses of the model's own head (`models.decoder_layer`), in the steps of the model itself.
#
# Every step also writes the head's keys and values of its tokens, into pages that share the layers' numbers: the head
# never has to catch up. The hidden states of each row's last positions are kept from step to step, since the head
# reads each token together with the hidden state before it. Behind a cached prefix that state is missing, and zeros
# take its place: guesses are verified like all others, so this cannot change a token.


@dataclass(slots=True)
class _HeadDraft:
    """Drafting state of one row."""

    index: int
    """The row's index in the batch."""
    row: Row
    hidden: torch.Tensor
    """[width] of the position before the newest token."""
    guesses: tuple[int, ...] = ()
    chance: float = 1.0
    """Product of the head's probabilities of the guesses."""


def cycled_pages(count: int, num_pages: int) -> list[int]:
    """Numbers of `count` pages for a row of a profile run, repeated where the pool has fewer: what such a row writes is
    never used. Page 0 is padding."""
    return [1 + index % (num_pages - 1) for index in range(count)]


class MTPGuesser:
    """Fills in the guesses of rows (`seams.Guesser`), and computes steps such that it can. One thread at a time."""

    def __init__(self, runner: ModelRunner, model: Decoder, max_num_seqs: int) -> None:
        self._runner, self._model = runner, model
        self._kept: list[tuple[ref[RequestSpec], int, torch.Tensor] | None] = [None] * max_num_seqs
        """For each slot its request, a position, and the hidden states [positions, width] from that position on."""
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
        """Do nothing: all memory is the model's."""

    def forward(self, rows: Sequence[Row], inputs: StepInputs, traces: Traces | None = None) -> torch.Tensor:
        """Logits of a pass, as `ModelRunner.forward` gives them; the head keeps what it needs of it."""
        model, wanted, step = self._model, inputs.logit_rows, self._runner.context_of(inputs, traces)
        bounds = inputs.view.qo_indptr.tolist()
        whole = len(wanted) == len(inputs.ids)
        before = self._no_hidden(len(inputs.ids))
        features: torch.Tensor | None = None
        # with adapters, the last layer's sums depend on which rows are computed: they must be those of a run without
        # speculation, so the head gets no hidden states then
        if step.adapters is None or whole:
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
        """Zeros [tokens, width] that stand for unknown hidden states."""
        return torch.zeros(tokens, self._model.config.width, dtype=self._model.dtype)

    def _before(self, row: Row) -> torch.Tensor | None:
        """The hidden state [width] of the position before the row's first; None: it is not known."""
        kept = self._kept[row.slot]
        if kept is None or kept[0]() is not row.spec:
            return None
        index = row.start - 1 - kept[1]
        return kept[2][index] if 0 <= index < len(kept[2]) else None

    def guess(self, batch: Batch) -> Batch:
        """`batch` with its open drafts replaced by guesses, as it is to be computed."""
        rows = list(batch.rows)
        asked = [index for index, row in enumerate(rows) if row.drafts and row.awaits_drafts]
        if not asked:
            return batch
        work = []
        for index in asked:
            row = rows[index]
            hidden = self._before(row)
            # a row of several known tokens (a grammar forced some) lacks the hidden states between them
            if hidden is not None and row.num_scheduled - len(row.drafts) == 1:
                work.append(_HeadDraft(index, row, hidden))
        guesses_by_row: dict[int, tuple[int, ...]] = dict.fromkeys(asked, ())
        with self._computing():
            guesses_by_row |= {guess.index: guess.guesses for guess in self._guess(work)}
        for index, guesses in guesses_by_row.items():
            row = rows[index]
            count = row.num_scheduled - len(row.drafts) + len(guesses)
            rows[index] = row._replace(num_scheduled=count, drafts=guesses)
        return batch._replace(rows=tuple(rows))

    def _guess(self, work: list[_HeadDraft]) -> list[_HeadDraft]:
        """`work` with guesses made round by round, one for each unfinished row."""
        done, unfinished = list(work), work
        while unfinished:
            inputs = [_input(draft.row, draft.guesses) for draft in unfinished]
            sampling_rows = [
                draft.row._replace(num_scheduled=1 + len(draft.guesses), drafts=draft.guesses) for draft in unfinished
            ]
            before = torch.stack([draft.hidden for draft in unfinished])
            tokens, chances, hidden = self.round(inputs, sampling_rows, before)
            following = []
            for number, (draft, token) in enumerate(zip(unfinished, tokens, strict=True)):
                draft.chance *= chances[number]
                if not chances[number]:  # no token can be drawn
                    continue
                draft.guesses, draft.hidden = (*draft.guesses, token), hidden[number]
                more = len(draft.guesses) < len(draft.row.drafts) and token not in draft.row.spec.stop_ids
                if more and draft.chance >= self._least:
                    following.append(draft)
            unfinished = following
        return done

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Context in which rounds are computed: the runner's device and threads, without gradients."""
        runner = self._runner
        cores = runner.cores.step(torch_alone=self._model.compiled, small=runner.small)
        with torch.inference_mode(), on_device(runner.device), cores:
            yield

    def round(
        self, rows: Sequence[Row], sampling_rows: Sequence[Row], before: torch.Tensor
    ) -> tuple[list[int], list[float], torch.Tensor]:
        """Run the head once over the tokens of `rows`, and sample one token for each of `sampling_rows`, of which there
        are as many as tokens. `before` [tokens, width]: hidden states of the positions before these. Returns (sampled
        tokens, their probabilities, hidden states [tokens, width] for the next round)."""
        runner, model = self._runner, self._model
        step = runner.buffers.build(Batch(0, tuple(rows)), runner.last_token)
        context = runner.context_of(inputs_of(step, rows, None)[0])
        logits, hidden = model.guess(step.input_ids, before, context)
        sampled = runner.sampler.sample(sampling_rows, logits, FilledMasks.none(), runner.last_token)
        chosen = logits.gather(1, sampled.tokens[:, None])[:, 0].float()
        chances = (chosen - logits.float().logsumexp(-1)).exp().nan_to_num_(0.0).tolist()
        return sampled.tokens.tolist(), chances, hidden


def _input(row: Row, guesses: tuple[int, ...]) -> Row:
    """A row of one token: the last of the `guesses`, or the row's newest token if there are none."""
    return row._replace(
        start=row.start + len(guesses), num_scheduled=1, samples=False, drafts=guesses[-1:], adapter_slot=0, state=None,
        window=None,
    )  # fmt: skip
