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
from asyncengine.step import Row

if TYPE_CHECKING:
    from asyncengine.execution.sampling.device_sampler import DeviceSampler

_BLOCK = 512
_KERNEL_TYPES = (torch.bfloat16, torch.float32)
"""Dtypes of logits that the compiled choice takes."""
_FEW = 64
"""Logits up to which each is looked at by itself."""
NON_FINITE = "the model produced non-finite logits"
NOTHING_ALLOWED = "no token is allowed: grammar, logit_bias, logits_processors and min_tokens exclude all"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of the sampling rows. Some may be void: that is known when it is here, not when it is computed."""

    tokens: torch.Tensor
    """int64 [rows]; 0 where void."""
    best: torch.Tensor
    """[rows] the largest logit of each row; not finite: the row has no token."""
    processed: Collection[int]
    """Rows whose logits were changed before anything was chosen."""
    changed: torch.Tensor | None = None
    """float32 [len(processed), vocab] logits of these as they were chosen from, on the device; not fetched."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Row -> why a processor of its request failed: the row has no token."""

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
        """Know the parameters of `rows`, which sample the tokens at `positions`. Returns the places of those whose
        logits are to be processed before anything is chosen, grammars' masks aside, and of those whose
        log-probabilities are asked for."""
        self._update(rows)
        params = self._params
        return np.flatnonzero(params.processed_at(slots, positions)), np.flatnonzero(params.scored[slots])

    def _update(self, rows: Sequence[Row]) -> list[int]:
        own = self._params.update(rows)
        for slot in self._params.renewed:
            self.tables.forget(slot)
        return own

    def sample(
        self, rows: Sequence[Row], logits: torch.Tensor, masks: FilledMasks, last_token: torch.Tensor
    ) -> Sampled:
        """One token for each row from its logits [rows, vocab] (not modified), among those its mask allows."""
        own = self._update(rows)
        few = self._kernel is not None and len(rows) <= self._kernel.few and logits.dtype in _KERNEL_TYPES
        processed_slots = self._params.processed
        if few and not masks.places and not any(processed_slots[row.slot] for row in rows):  # taken as they are
            tokens, best = self._kernel.choose_few(logits, *self._params.few_columns(rows))
            return Sampled(tokens, best, ())
        slots = np.array(own, dtype=np.int64)
        processors = LogitProcessors(rows, self._params, slots, masks, self._vocab_size)
        positions = processors.positions
        if not processors.places:
            return Sampled(*self._choose(slots, positions, logits), ())
        places = np.array(processors.places, dtype=np.int64)
        if len(places) == len(rows):
            processed = processors.apply(logits, self.tables, last_token)
            tokens, best = self._choose(slots, positions, processed)
        else:  # copying everybody's logits would take longer than choosing for the processed rows twice
            index = self._to_device(places)
            processed = processors.apply(logits[index], self.tables, last_token)
            tokens, best = self._choose(slots, positions, logits)
            again = self._choose(slots[places], positions[places], processed)
            tokens, best = tokens.index_copy(0, index, again[0]), best.float().index_copy(0, index, again[1])
        return Sampled(tokens, best, processors.places, processed, processors.failed)

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
        """Forget the counts of the slot's request, which are wrong: its next row counts anew."""
        self.tables.penalties.forget(slot)

    def _draw(
        self, positions: Int64Array, slots: Int64Array, chosen: Int64Array, logits: torch.Tensor, greedy: torch.Tensor
    ) -> torch.Tensor:
        """The greedy tokens with those of the rows `chosen` replaced by draws."""
        params, owned = self._params, slots[chosen]
        index = self._to_device(chosen)
        scaled, least = self._scaled(owned, logits if len(chosen) == len(slots) else logits[index])
        keys = self._to_device(noise_keys(params.seed_low[owned], params.seed_high[owned], positions))
        return greedy.index_copy(0, index, draw(scaled, least, keys))

    def _scaled(self, slots: Int64Array, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 [rows, vocab] logits divided by the temperature, if there is one; float32 [rows] the smallest of
        them that truncation keeps) of logits [rows, vocab]."""
        params = self._params
        temperature = np.where(params.temperature[slots] > 0, params.temperature[slots], np.float32(1))
        divisor, top_p, min_p = self._to_device(np.stack((temperature, params.top_p[slots], params.min_p[slots])))
        scaled = logits.float() / divisor[:, None]
        least = scaled.amax(dim=-1) + torch.log(min_p)
        top_k = params.top_k[slots]
        truncated = np.flatnonzero((top_k > 0) | (params.top_p[slots] < 1))
        if truncated.size:
            where = self._to_device(truncated)
            part = scaled if len(truncated) == len(slots) else scaled[where]
            limits = kept_threshold(part, top_k[truncated], top_p[where])
            least = least.index_copy(0, where, torch.maximum(least[where], limits))
        return scaled, least

    def scored_logits(
        self, rows: Sequence[Row], places: Sequence[int], logits: torch.Tensor, sampled: Sampled
    ) -> torch.Tensor:
        """Logits [len(places), vocab] by which the tokens of `rows` at `places` are scored: the model's own, or float32
        logarithms of the distribution that each token was drawn from, -inf where no other token could be drawn
        (`logprobs_of`).

        logits [rows, vocab] are the model's, `sampled` what was drawn from them, on the device.
        """
        index = self._to_device(np.array(places, dtype=np.int64))
        found = logits[index]
        drawn = [at for at, place in enumerate(places) if rows[place].spec.params.logprobs_of == "sampled"]
        if not drawn:
            return found
        found = found.float()
        number = {place: count for count, place in enumerate(sampled.processed)}
        edited = [at for at in drawn if places[at] in number]
        if edited:
            assert sampled.changed is not None
            sources = [number[places[at]] for at in edited]
            into, source = self._to_device(np.array((edited, sources), dtype=np.int64))
            found.index_copy_(0, into, sampled.changed[source])
        slots = np.array([rows[places[at]].slot for at in drawn], dtype=np.int64)
        own = self._to_device(np.array(drawn, dtype=np.int64))
        return found.index_copy_(0, own, self._drawn_from(slots, found[own], sampled.tokens[index[own]]))

    def _drawn_from(self, slots: Int64Array, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab] logits with -inf for all that could not be drawn; `tokens` int64 [rows] were."""
        scaled, least = self._scaled(slots, logits)
        # kernels that chose may have rounded the threshold otherwise: what was drawn was kept
        kept = scaled >= torch.minimum(least[:, None], scaled.gather(1, tokens[:, None]))
        greedy = self._to_device(self._params.temperature[slots] == 0)
        point = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
        return scaled.masked_fill(~torch.where(greedy[:, None], point, kept), float("-inf"))

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return upload(array, self._device)


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


# The parts of a draw: random numbers as a stateless function of (seed, position, token id), and what is kept.
#
# Nothing is drawn from a generator, so a token does not depend on batch neighbours, slots, chunking, preemption or
# padding, and replaying a step gives the same token (the idea of vLLM's model runner V2). The mixing function is the
# finalizer of MurmurHash3 (Austin Appleby, public domain); arithmetic is in int64, masked to 32 bits.

Integers = TypeVar("Integers", torch.Tensor, Int64Array)

_MASK = 0xFFFFFFFF
BLOCK_FLAG = 1 << 31
"""Set in an id to name a block of tokens rather than a token; the two draw independent numbers."""


AGAIN_FLAG = 1 << 30
"""Set in the id of a token that is drawn in the place of another one at the same position."""


def _mix(value: Integers) -> Integers:
    """A bijection of [0, 2**32) in which each input bit flips each output bit half of the time."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _MASK
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _MASK
    return value ^ (value >> 16)


def noise_keys(seed_low: Int64Array, seed_high: Int64Array, positions: Int64Array) -> Int64Array:
    """int64 [2, rows]: the part of every random number that depends on seed and position [rows] alone.

    The halves of the seed are in [0, 2**32). On the host, which knows them all: on a device it would be a hundred
    small kernels a step.
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
"""A top-p set is looked for among this many tokens before everything is sorted."""


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
        part = (logits[index], top_p[index])
        found = _of_largest(part[0], top_k[chosen], part[1]) if chosen is limited else _by_sorting(*part)
        least = least.index_copy(0, index, found)
    return least


def _of_largest(logits: torch.Tensor, top_k: Int64Array, top_p: torch.Tensor) -> torch.Tensor:
    """Thresholds of top-p over the tokens that top-k left."""
    width = min(int(top_k.max()), logits.shape[-1])
    values = logits.topk(width, dim=-1).values
    limits = upload(top_k, logits.device)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= limits[:, None], float("-inf"))
    return _top_p_threshold(values, torch.logsumexp(values, dim=-1), top_p)[0]


def _by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Find the threshold of top-p alone. Looks at what a first try gave; a GPU without kernels has to wait for it."""
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
