"""Guesses of the model's own head (`models.mtp`), in the steps of the model itself.

Every step has the head keep what it needs of the tokens that it computes, beside the keys and values of the layers: so
it is always ready, and knows what the pages know. The hidden states of the last positions of each row are kept from
step to step, as the next row's first token needs the one before it; one is missing behind a prefix that was found in
the cache, where zeros take its place. None of this changes a token: guesses are checked like all others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch

from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.layers.recorded import GREEDY
from asyncengine.execution.layers.step import CausalLM
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.runner.step_inputs import StepInputs, inputs_of
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row, sampling_places

if TYPE_CHECKING:
    from asyncengine.execution.runner.model_runner import ModelRunner


@dataclass(slots=True)
class _Guessing:
    """One row's share of the work."""

    index: int
    """The row's place in the batch."""
    row: Row
    hidden: torch.Tensor
    """[width] of the position before the newest token."""
    guesses: tuple[int, ...] = ()
    chance: float = 1.0
    """That all guesses are right, going by the probabilities that the head gives them."""


class MTPGuesser:
    """Fills in the guesses of rows (`seams.Guesser`), and computes steps such that it can. One thread at a time."""

    def __init__(self, runner: ModelRunner, model: Decoder, max_num_seqs: int) -> None:
        self._runner, self._model = runner, model
        self._kept: list[tuple[ref[RequestSpec], int, torch.Tensor] | None] = [None] * max_num_seqs
        """The request of each slot, a position of it, and the hidden states from there on [positions, width]."""
        self._least = 0.0

    @staticmethod
    def of(runner: ModelRunner, model: CausalLM, max_num_seqs: int) -> MTPGuesser | None:
        """The guesser of a model that has a head; None: it has none."""
        if not isinstance(model, Decoder) or model.mtp is None:
            return None
        return MTPGuesser(runner, model, max_num_seqs)

    def time_round(self, count: int) -> float:
        """Seconds of a round of `count` tokens."""
        began, size = time.perf_counter(), self._runner.page_size
        pages = list(range(1, 1 + -(-(count + 1) // size)))
        row = Row(RequestSpec(0, (0,), GREEDY, count + 2), 0, 1, count, [0] * (count + 1), False, pages, False)
        with self._computing():
            self.round([row], sampling_places(row._replace(drafts=(0,) * (count - 1))), self._no_hidden(count))
        return time.perf_counter() - began

    def use(self, costs: tuple[float, ...], least_chance: float) -> None:
        """Guess from now on, at `costs` of rounds. `least_chance`: as of `DraftModel`."""
        self._runner.cores.forget()
        self._runner.draft_costs, self._least = costs, least_chance

    def remove(self) -> None:
        """Let the runner compute steps without the head, as nothing can be guessed."""
        self._runner.draft_model = self._runner.mtp = None

    def close(self) -> None:
        """It has nothing but the model's."""

    def forward(
        self, rows: Sequence[Row], inputs: StepInputs, routes: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Logits of a pass, as `ModelRunner.forward` gives them; the head keeps what it needs of it."""
        model, wanted, step = self._model, inputs.logit_rows, self._runner.context_of(inputs, routes)
        bounds = inputs.view.qo_indptr.tolist()
        whole = len(wanted) == len(inputs.ids)
        before = self._no_hidden(len(inputs.ids))
        hidden: torch.Tensor | None = None
        if step.adapters is None or whole:  # else the last layer's sums would be of other rows than without a head
            hidden = model.hidden_states(inputs.ids, step)
            before[1:] = hidden[:-1]
            logits = model.logits(hidden if whole else hidden.index_select(0, wanted), step)
        else:
            logits = model.forward(inputs.ids, step, wanted)
        for row, begin in zip(rows, bounds, strict=False):
            known = self._before(row)
            before[begin] = 0 if known is None else known
        model.write_mtp(inputs.ids, before, step)
        for row, end in zip(rows, bounds[1:], strict=True):
            count = 1 + len(row.drafts)
            kept = None if hidden is None else hidden[end - count : end].clone()
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
                work.append(_Guessing(index, row, known))
        made: dict[int, tuple[int, ...]] = dict.fromkeys(asked, ())
        with self._computing():
            made |= {each.index: each.guesses for each in self._guess(work)}
        for index, guesses in made.items():
            row = rows[index]
            count = row.num_scheduled - len(row.drafts) + len(guesses)
            rows[index] = row._replace(num_scheduled=count, drafts=guesses)
        return batch._replace(rows=tuple(rows))

    def _guess(self, work: list[_Guessing]) -> list[_Guessing]:
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
