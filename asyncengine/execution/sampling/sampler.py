"""From logits to tokens: penalties, bias, masks, temperature, truncation and a draw, for all rows of a step at once.

Order (SGLang's): penalties on the model's logits, logit bias, the caller's processors, grammar and minimum-length
masks, temperature, top-k, top-p over what top-k left, min-p. What happens to a row depends on its own parameters only,
and its random numbers on (seed, position, token id) only (`noise`), so neighbours never change its token. Steps that no
row asks for are left out: a greedy batch without extras is one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from asyncengine.execution.device.transfer import Int64Array, Readback, upload
from asyncengine.execution.sampling.logit_processors import LogitProcessors, SlotParams, SlotTables
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.kernels.api import compiler_missing, triton_missing
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Row

if TYPE_CHECKING:
    from asyncengine.execution.sampling.device_sampler import DeviceSampler

_BLOCK = 512
_KERNEL_TYPES = (torch.bfloat16, torch.float32)
"""Dtypes of logits that the compiled choice takes."""
_FEW = 64
"""Rows up to which finiteness is checked in Python: fewer than that are slower to check in numpy."""
NON_FINITE = "the model produced non-finite logits"
NOTHING_ALLOWED = "no token is allowed: grammar, logit_bias, logits_processors and min_tokens exclude all"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of the sampling rows. Some may be void, for want of a finite logit; `errors` tells, once on the host."""

    tokens: torch.Tensor
    """int64 [rows]; 0 where void."""
    best: torch.Tensor
    """[rows] the largest logit of each row; not finite: the row has no token."""
    processed: Collection[int]
    """Rows whose logits were processed before sampling."""
    changed: torch.Tensor | None = None
    """float32 [len(processed), vocab] processed logits of these rows, on the device; not fetched."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Row -> why a logits processor of its request failed: the row has no token."""

    def fetch(self, readback: Readback) -> Sampled:
        """The same on the host, once `readback` has arrived."""
        return Sampled(readback.fetch(self.tokens), readback.fetch(self.best), self.processed, failed=self.failed)

    @property
    def errors(self) -> dict[int, str]:
        """For host tensors: row -> why it has no token."""
        best = self.best
        few = best.shape[0] <= _FEW
        if all(map(math.isfinite, best.tolist())) if few else bool(np.isfinite(best.float().numpy()).all()):
            return dict(self.failed)
        return {
            row: NOTHING_ALLOWED if row in self.processed and value == float("-inf") else NON_FINITE
            for row, value in enumerate(self.best.tolist())
            if not math.isfinite(value)
        } | dict(self.failed)


class Sampler:
    """Samples one token per row. Holds per-slot state; one step at a time."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._params = SlotParams(max_num_seqs, vocab_size)
        self.tables = SlotTables(self._params, vocab_size, device)
        self._kernel: Any = None
        self.on_device: DeviceSampler | None = None
        """Samples by kernels alone, in a CUDA graph too; None: there are none for this device."""
        if triton_missing(device) is None:
            from asyncengine.execution.sampling.device_sampler import DeviceSampler

            self.on_device = DeviceSampler(self._params, max_num_seqs, vocab_size, device)
        if compiler_missing(torch.float32, device) is None:
            from asyncengine.kernels.api import SamplerKernel

            self._kernel = SamplerKernel(vocab_size)

    def begin(self, rows: Sequence[Row], slots: Int64Array, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Take the parameters of `rows`, which sample the tokens at `positions`. Returns the indices of rows whose
        logits are to be processed before sampling, grammars' masks aside, and of rows that want log-probabilities."""
        self._update(rows)
        params = self._params
        return np.flatnonzero(params.processed_at(slots, positions)), np.flatnonzero(params.scored[slots])

    def _update(self, rows: Sequence[Row]) -> list[int]:
        slots = self._params.update(rows)
        for slot in self._params.renewed:
            self.tables.forget(slot)
        return slots

    def sample(
        self, rows: Sequence[Row], logits: torch.Tensor, masks: FilledMasks, last_token: torch.Tensor
    ) -> Sampled:
        """One token for each row from its logits [rows, vocab] (not modified), among those its mask allows."""
        slot_list = self._update(rows)
        few = self._kernel is not None and len(rows) <= self._kernel.few and logits.dtype in _KERNEL_TYPES
        processed_slots = self._params.processed
        # the common step: a few rows without processors, for which building arrays would take longer than sampling
        if few and not masks.samples and not any(processed_slots[row.slot] for row in rows):
            tokens, best = self._kernel.choose_few(logits, *self._params.few_columns(rows))
            return Sampled(tokens, best, ())
        slots = np.array(slot_list, dtype=np.int64)
        processors = LogitProcessors(rows, self._params, slots, masks, self._vocab_size)
        positions = processors.positions
        if not processors.rows:
            return Sampled(*self._choose(slots, positions, logits), ())
        rows_processed = np.array(processors.rows, dtype=np.int64)
        if len(rows_processed) == len(rows):
            processed = processors.apply(logits, self.tables, last_token)
            tokens, best = self._choose(slots, positions, processed)
        else:  # copying all rows' logits would take longer than sampling for the processed rows twice
            index = upload(rows_processed, self._device)
            processed = processors.apply(logits[index], self.tables, last_token)
            tokens, best = self._choose(slots, positions, logits)
            again = self._choose(slots[rows_processed], positions[rows_processed], processed)
            tokens, best = tokens.index_copy(0, index, again[0]), best.float().index_copy(0, index, again[1])
        return Sampled(tokens, best, processors.rows, processed, processors.failed)

    def _choose(
        self, slots: Int64Array, positions: Int64Array, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens int64 [rows], 0 where void; the largest logit of each row) of logits [rows, vocab]."""
        if self._kernel is not None and logits.dtype in _KERNEL_TYPES:
            return self._kernel.choose(logits, *self._params.columns(slots, positions))
        if self.on_device is not None:
            return self.on_device.choose(logits, slots, positions)
        best, tokens = logits.max(dim=-1)
        random_rows = np.flatnonzero(self._params.temperature[slots] > 0)
        if random_rows.size:
            tokens = self._draw(positions[random_rows], slots, random_rows, logits, tokens)
        return torch.where(torch.isfinite(best), tokens, 0), best

    def forget(self, slot: int) -> None:
        """Drop the token counts of the slot's request, which are wrong: its next row counts anew."""
        self.tables.penalties.forget(slot)

    def _draw(
        self, positions: Int64Array, slots: Int64Array, chosen: Int64Array, logits: torch.Tensor, greedy: torch.Tensor
    ) -> torch.Tensor:
        """The greedy tokens with those of the rows `chosen` replaced by draws."""
        params, owned = self._params, slots[chosen]
        index = upload(chosen, self._device)
        scaled, least = self._scaled(owned, logits if len(chosen) == len(slots) else logits[index])
        keys = upload(noise_keys(params.seed_low[owned], params.seed_high[owned], positions), self._device)
        return greedy.index_copy(0, index, draw(scaled, least, keys))

    def _scaled(self, slots: Int64Array, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 [rows, vocab] logits divided by the temperature, if it is not 0; float32 [rows] the smallest of
        these that truncation keeps) of logits [rows, vocab]."""
        params = self._params
        temperature = np.where(params.temperature[slots] > 0, params.temperature[slots], np.float32(1))
        divisor, top_p, min_p = upload(np.stack((temperature, params.top_p[slots], params.min_p[slots])), self._device)
        scaled = logits.float() / divisor[:, None]
        least = scaled.amax(dim=-1) + torch.log(min_p)
        top_k = params.top_k[slots]
        truncated = np.flatnonzero((top_k > 0) | (params.top_p[slots] < 1))
        if truncated.size:
            where = upload(truncated, self._device)
            truncated_logits = scaled if len(truncated) == len(slots) else scaled[where]
            limits = kept_threshold(truncated_logits, top_k[truncated], top_p[where])
            least = least.index_copy(0, where, torch.maximum(least[where], limits))
        return scaled, least

    def scored_logits(
        self, rows: Sequence[Row], indices: Sequence[int], logits: torch.Tensor, sampled: Sampled
    ) -> torch.Tensor:
        """Logits [len(indices), vocab] by which the tokens of the rows `indices` are scored: the model's, or float32
        logits of the distribution that each token was drawn from, with -inf for tokens that could not be drawn
        (`logprobs_of`).

        logits [rows, vocab] are the model's, `sampled` the tokens drawn from them, on the device.
        """
        index = upload(np.array(indices, dtype=np.int64), self._device)
        scored = logits[index]
        drawn = [at for at, sample in enumerate(indices) if rows[sample].spec.params.logprobs_of == "sampled"]
        if not drawn:
            return scored
        scored = scored.float()
        number = {sample: count for count, sample in enumerate(sampled.processed)}
        edited = [position for position in drawn if indices[position] in number]
        if edited:
            assert sampled.changed is not None
            sources = [number[indices[position]] for position in edited]
            into, source = upload(np.array((edited, sources), dtype=np.int64), self._device)
            scored.index_copy_(0, into, sampled.changed[source])
        slots = np.array([rows[indices[position]].slot for position in drawn], dtype=np.int64)
        drawn_indices = upload(np.array(drawn, dtype=np.int64), self._device)
        tokens = sampled.tokens[index[drawn_indices]]
        return scored.index_copy_(0, drawn_indices, self._drawn_from(slots, scored[drawn_indices], tokens))

    def _drawn_from(self, slots: Int64Array, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits float32 [rows, vocab] with -inf where no token could be drawn; `tokens` int64 [rows] were drawn."""
        scaled, least = self._scaled(slots, logits)
        # the sampling kernel may round the threshold differently; a token that was drawn was certainly above it
        kept = scaled >= torch.minimum(least[:, None], scaled.gather(1, tokens[:, None]))
        greedy = upload(self._params.temperature[slots] == 0, self._device)
        point = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
        return scaled.masked_fill(~torch.where(greedy[:, None], point, kept), float("-inf"))


def draw(logits: torch.Tensor, least: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One draw per row from softmax(logits) over the tokens with logits >= least: int64 [rows].

    logits float32 [rows, vocab], least float32 [rows], keys int64 [2, rows] (`noise_keys`). Gumbel-max over blocks of
    tokens by their total probability, then over the tokens of the winning block: the same distribution as over all
    tokens at once for about sqrt(vocab) random numbers. Hashing a vocabulary of 150,000 would cost a millisecond a row.
    """
    rows, vocab = logits.shape
    logits = logits.masked_fill(logits < least[:, None], float("-inf"))
    num_blocks = -(-vocab // _BLOCK)
    padded = torch.nn.functional.pad(logits, (0, num_blocks * _BLOCK - vocab), value=float("-inf"))
    blocks = padded.view(rows, num_blocks, _BLOCK)
    block_ids = torch.arange(num_blocks, device=logits.device).expand(rows, -1) | BLOCK_FLAG
    totals = torch.logsumexp(blocks, dim=-1)
    winner = (totals + gumbel(keys, block_ids)).argmax(dim=-1)
    inside = blocks[torch.arange(rows, device=logits.device), winner]
    ids = winner[:, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    chosen = (inside + gumbel(keys, ids)).argmax(dim=-1)
    return (winner * _BLOCK + chosen).clamp_(max=vocab - 1)


# Random numbers as a stateless function of (seed, position, token id), and the thresholds of truncation.
#
# Nothing is drawn from a generator, so a token does not depend on batch neighbours, slots, chunking, preemption or
# padding, and replaying a step gives the same token (the idea of vLLM's model runner V2). The mixing function is the
# finalizer of MurmurHash3 (Austin Appleby, public domain); arithmetic is in int64, masked to 32 bits.

Integers = TypeVar("Integers", torch.Tensor, Int64Array)

_MASK = 0xFFFFFFFF
BLOCK_FLAG = 1 << 31
"""Set in an id to name a block of tokens rather than a token; the two draw independent numbers."""


AGAIN_FLAG = 1 << 30
"""Set in the id of a token that is drawn to replace another one at the same position: it draws independent numbers."""


def _mix(value: Integers) -> Integers:
    """A bijection of [0, 2**32) in which each input bit flips each output bit half of the time."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def noise_keys(seed_low: Int64Array, seed_high: Int64Array, positions: Int64Array) -> Int64Array:
    """int64 [2, rows]: the hash of seed and position [rows], from which `gumbel` derives the noise of each token.

    The halves of the seed are in [0, 2**32). Computed on the host: on a GPU it would be a hundred small kernels a step.
    """
    where = positions & _MASK
    inner = _mix(_mix(_mix(seed_low ^ 0x9E3779B9) ^ seed_high) ^ where)
    outer = _mix(_mix(_mix(seed_high ^ 0x7F4A7C15) ^ where) ^ seed_low)
    return np.stack((inner, outer))


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, of the shape of `ids` [rows, n], which are in [0, 2**32); always finite. keys:
    `noise_keys`.

    argmax(logits + noise) over ids is a draw from softmax(logits) (Gumbel 1954).
    """
    inner, outer = keys
    bits = _mix((_mix(ids ^ inner[:, None]) + outer[:, None]) & _MASK)
    uniform = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform)).float()


# The top-k and top-p threshold of a row of logits: the smallest kept value, not a set of ids. Tokens that tie with that
# value are all kept, so the answer does not depend on how a sort breaks ties.

_FIRST_CANDIDATES = 1024
"""A top-p set is searched among the likeliest tokens of this number first; sorting the vocabulary is the fallback."""


def kept_threshold(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest logit that top-k (0: all), then top-p keep in each row: float32 [rows].

    logits float32 [rows, vocab], top_p float32 [rows] on their device.
    """
    limited, unlimited = np.flatnonzero(top_k), np.flatnonzero(top_k == 0)
    if not unlimited.size:
        return _of_largest(logits, top_k, top_p)
    if not limited.size:
        return _by_sorting(logits, top_p)
    least = logits.new_empty(logits.shape[0])
    for chosen in (limited, unlimited):
        index = upload(chosen, logits.device)
        some, probability = logits[index], top_p[index]
        limits = _of_largest(some, top_k[chosen], probability) if chosen is limited else _by_sorting(some, probability)
        least = least.index_copy(0, index, limits)
    return least


def _of_largest(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """Thresholds [rows] of top-p over the tokens that top-k keeps."""
    width = min(int(top_k.max()), logits.shape[-1])
    values = logits.topk(width, dim=-1).values
    limits = upload(top_k, logits.device)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limits[:, None], float("-inf"))
    return _top_p_threshold(values, torch.logsumexp(values, dim=-1), top_p)[0]


def _by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Thresholds [rows] of top-p alone. The host looks at the first search's result, so it waits for a GPU here."""
    totals = torch.logsumexp(logits, dim=-1)
    width = min(_FIRST_CANDIDATES, logits.shape[-1])
    least, reached = _top_p_threshold(logits.topk(width, dim=-1).values, totals, top_p)
    short = reached < top_p
    if width < logits.shape[-1] and bool(short.any()):
        index = torch.nonzero(short)[:, 0]
        values = logits[index].sort(dim=-1, descending=True).values
        least = least.index_copy(0, index, _top_p_threshold(values, totals[index], top_p[index])[0])
    return least


def _top_p_threshold(
    values: torch.Tensor, totals: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest value of the smallest set of `values` (descending, [rows, n]) whose probability reaches `top_p`.

    Also the probability of all of them. `totals` [rows] is the logarithm that normalises; -inf values do not count.
    """
    probabilities = torch.exp(values - totals[:, None])
    running = probabilities.cumsum(dim=-1)
    outside = (running - probabilities >= top_p[:, None]) | torch.isneginf(values)
    outside[:, 0] = False
    return values.masked_fill(outside, float("inf")).amin(dim=-1), running[:, -1]


# Tokens that a matcher may take instead of the sampled one, if the output could not end within its budget with that.

MOST = 64
"""Most tokens that are offered to the matcher."""


def drawn_again(logits: torch.Tensor, spec: RequestSpec, position: int) -> list[int]:
    """The `MOST` likeliest tokens in the order in which a matcher tries them at `position` of a request: as further
    draws without replacement would give them, followed by those that truncation leaves out, likeliest first. For a
    greedy request: likeliest first.

    logits float32 [vocab] on the host, as the first token was drawn from them (penalties and the grammar's mask
    applied). A pure function: the random numbers follow from (seed, position, token id).
    """
    params = spec.params
    temperature = 1.0 if params.temperature is None else params.temperature
    likeliest = logits.topk(min(MOST, len(logits)))
    pairs = zip((-likeliest.values).tolist(), likeliest.indices.tolist(), strict=True)
    ids = [token for value, token in sorted(pairs) if value < float("inf")]
    if not temperature or not ids:
        return ids
    scaled = logits[None].float() / temperature
    least = float(scaled.max()) + (float(np.log(params.min_p)) if params.min_p else -float("inf"))
    top_k, top_p = params.top_k or 0, 1.0 if params.top_p is None else params.top_p
    if top_p < 1 or 0 < top_k < len(logits):
        limit = kept_threshold(scaled, np.array([top_k if top_k < len(logits) else 0]), torch.tensor([top_p]))
        least = max(least, float(limit))
    seed_low, seed_high = spec.seed & 0xFFFFFFFF, spec.seed >> 32 & 0xFFFFFFFF
    keys = noise_keys(*(np.array([number]) for number in (seed_low, seed_high, position)))
    where = torch.tensor([ids])
    drawn_from = scaled[0, where[0]]
    noisy = drawn_from + gumbel(torch.from_numpy(keys), where | AGAIN_FLAG)[0]
    scores = zip(noisy.tolist(), (drawn_from >= least).tolist(), strict=True)
    ranks = [(0, -score) if kept else (1, index) for index, (score, kept) in enumerate(scores)]
    return [ids[index] for index in sorted(range(len(ids)), key=ranks.__getitem__)]
