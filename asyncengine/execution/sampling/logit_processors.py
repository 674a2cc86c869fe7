"""Logit processors: penalties, bias, the caller's own, grammars' masks and `min_tokens`.

They are applied before anything is chosen. Rows without any stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.device.transfer import Int64Array, send, upload
from asyncengine.execution.sampling.masks import FilledMasks, apply_masks
from asyncengine.kernels.api import row_numbers as n
from asyncengine.kernels.api import triton_missing
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Row

# Sampling parameters that steps apply; a request with any other parameter is refused by name when it is submitted.

KNOWN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "logprob_token_ids", "logprobs_of",
    "prompt_logprobs", "prompt_logprobs_start", "return_routed_experts", "routed_experts_start", "return_hidden_states",
    "hidden_states_start", "steering_vectors",
)  # fmt: skip
"""Parameters that samplers of every device apply, those in CUDA graphs included (`ModelInfo.sampling_parameters`)."""


def _called(functions: Sequence[Callable[..., Any]], row: Row, logits: torch.Tensor) -> torch.Tensor:
    """Logits [vocab] of a row after its request's own processors, called one after the other."""
    output = row.tokens[row.spec.prompt_len : row.start + row.num_scheduled]
    for function in functions:
        processed = function(list(row.spec.prompt_ids), list(output), logits)
        if not isinstance(processed, torch.Tensor) or processed.shape != logits.shape:
            raise TypeError(f"it must return a tensor of shape {list(logits.shape)}")
        logits = processed
    return logits


PROCESSORS: dict[str, Callable[[Any, Row, torch.Tensor], torch.Tensor]] = {"logits_processors": _called}
"""Parameters that need a CPU: name -> function of (the parameter's value, a row, its float32 logits [vocab]) that
returns processed logits. Called in this order unless the value is empty, 0 or None, before masks, and for drafts as
well. Only processors that are declared with `reads_output` can rely on all of the row's tokens being known."""


def known_on(device: torch.device) -> tuple[str, ...]:
    """Sampling parameters that steps on a device apply."""
    return (*KNOWN, *PROCESSORS) if device.type == "cpu" else KNOWN


# Sampling parameters of every slot as arrays, written once when a slot changes hands.


class SlotParams:
    """Per-slot columns, read by fancy-indexing with the slots of a step."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.version = 0
        """Grows with every slot that gets another request."""
        self._specs: list[ref[RequestSpec] | None] = [None] * max_num_seqs
        """The request whose parameters a slot has. Weak references, so that an unused slot keeps no prompt alive."""
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        """0: all."""
        self.truncated = np.zeros(max_num_seqs, dtype=np.bool_)
        """Whether top-k, top-p or min-p may leave out tokens."""
        self.seed_low = np.zeros(max_num_seqs, dtype=np.int64)
        self.seed_high = np.zeros(max_num_seqs, dtype=np.int64)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.penalized = np.zeros(max_num_seqs, dtype=np.bool_)
        self.processed = [False] * max_num_seqs
        """Whether the slot's logits may be processed before sampling, grammars' masks aside."""
        self.scored = np.zeros(max_num_seqs, dtype=np.bool_)
        """Whether the request wants log-probabilities."""
        self.biased = np.zeros(max_num_seqs, dtype=np.bool_)
        self.prompt_len = np.zeros(max_num_seqs, dtype=np.int64)
        self.held_until = np.zeros(max_num_seqs, dtype=np.int64)
        """Position of the first token that may be a stop id (`min_tokens`); 0: any position."""
        self.renewed: list[int] = []
        """Slots that got another request in the last update."""
        self._few = [((1.0, 1.0, 0.0), (0, 0, 0))] * max_num_seqs
        """Columns of each slot, but for the position."""

    def update(self, rows: Sequence[Row]) -> list[int]:
        """Bring the slots of `rows` up to date; returns the slots."""
        if self.renewed:
            self.renewed = []
        for row in rows:
            known = self._specs[row.slot]
            if known is None or known() is not row.spec:
                self._write(row.slot, row.spec)
                self.renewed.append(row.slot)
        return [row.slot for row in rows]

    def few_columns(self, rows: Sequence[Row]) -> tuple[list[float], list[int]]:
        """The same as `columns` for the slots of a few `rows`, flattened, as Python numbers; no update is made."""
        floats: list[float] = []
        integers: list[int] = []
        for row in rows:
            own_floats, own_integers = self._few[row.slot]
            floats += own_floats
            integers += own_integers
            integers.append(row.start + row.num_scheduled)
        return floats, integers

    def columns(self, slots: Int64Array, positions: Int64Array) -> tuple[NDArray[np.float32], Int64Array]:
        """Arguments of a compiled sampler: float32 [rows, 3] temperature, top-p, min-p; int64 [rows, 4] top-k, the
        halves of the seed, position."""
        floats = np.stack((self.temperature[slots], self.top_p[slots], self.min_p[slots]), axis=1)
        integers = (self.top_k[slots], self.seed_low[slots], self.seed_high[slots], positions)
        return floats, np.stack(integers, axis=1)

    def processed_at(self, slots: Int64Array, positions: Int64Array) -> NDArray[np.bool_]:
        """Whether the rows' next tokens, at `positions`, have processed logits, grammars' masks aside: bool [rows]."""
        return self.penalized[slots] | self.biased[slots] | (positions < self.held_until[slots])

    def packed(self) -> NDArray[np.int32]:
        """Parameters as a sampler on a device takes them: int32 [slots, 8], bits of temperature, top-p and min-p, then
        top-k and the halves of the seed."""
        packed = np.zeros((len(self.temperature), 8), dtype=np.int32)
        packed.view(np.float32)[:, :3] = np.stack((self.temperature, self.top_p, self.min_p), axis=1)
        packed.view(np.uint32)[:, 3:6] = np.stack((self.top_k, self.seed_low, self.seed_high), axis=1)
        return packed

    def _write(self, slot: int, spec: RequestSpec) -> None:
        self.version += 1
        params = spec.params
        top_k = params.top_k or 0
        self.temperature[slot] = 1.0 if params.temperature is None else params.temperature
        self.top_p[slot] = 1.0 if params.top_p is None else params.top_p
        self.min_p[slot] = params.min_p or 0.0
        self.top_k[slot] = top_k if 0 < top_k < self._vocab_size else 0
        self.truncated[slot] = self.top_k[slot] > 0 or self.top_p[slot] < 1 or self.min_p[slot] > 0
        self.seed_low[slot] = spec.seed & 0xFFFFFFFF
        self.seed_high[slot] = (spec.seed >> 32) & 0xFFFFFFFF
        self.repetition[slot] = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.penalized[slot] = self.repetition[slot] != 1.0 or self.presence[slot] != 0.0 or self.frequency[slot] != 0.0
        held_open = bool(spec.stop_ids) and params.min_tokens > 0
        self.biased[slot] = bool(params.logit_bias) or any(getattr(params, name, None) for name in PROCESSORS)
        self.prompt_len[slot] = spec.prompt_len
        self.held_until[slot] = spec.prompt_len + params.min_tokens if held_open else 0
        self.processed[slot] = bool(self.penalized[slot] or self.biased[slot] or held_open)
        self.scored[slot] = bool(params.logprobs)
        floats, integers = self.columns(np.array([slot]), np.zeros(1, dtype=np.int64))
        self._few[slot] = tuple(floats[0].tolist()), tuple(integers[0, :3].tolist())
        self._specs[slot] = ref(spec)


@dataclass(slots=True)
class _SlotState:
    spec: ref[RequestSpec]
    prompt_seen: torch.Tensor
    """bool [vocab]."""
    output_counts: torch.Tensor
    """int32 [vocab]."""


class PenaltyTable:
    """Tokens that each penalized request has seen, by slot, kept on the device between steps.

    Memory is taken only for slots whose request has a penalty: two vocabulary-wide rows each. A slot's counts cover a
    prefix of the request's tokens. They are extended by new tokens, and rebuilt when the slot gets another request or
    the request has fewer tokens than were counted (it was preempted with a token in flight). Kernels that read the
    counts add a decode row's one new token themselves, so that decode steps need no work for each row here.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self.states: dict[int, _SlotState] = {}
        """Counts by slot."""
        self._counted = np.full(max_num_seqs, -1, dtype=np.int64)
        """Number of each slot's tokens that are counted, the one in flight included; -1: the slot has no counts."""
        self._addresses = np.zeros((2, max_num_seqs), dtype=np.int64)
        """Addresses of each slot's `prompt_seen` and `output_counts`."""

    def forget(self, slot: int) -> None:
        """Drop the slot's counts. Idempotent."""
        self.states.pop(slot, None)
        self._counted[slot] = -1

    def counting(self, slots: Int64Array, positions: Int64Array, prompts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(int64 [2, rows] addresses of prompt_seen and output_counts, int64 [rows] flags) for a kernel, of decode rows
        whose input token precedes `positions`. Flag 1: the kernel counts that token. Flag 0: the counts lag behind, or
        the token is of the prompt, and the caller has to call `seen` first.

        `prompts`: prompt lengths. The slots must have the requests that were counted; `forget` is called otherwise.
        """
        ready = (self._counted[slots] == positions - 1) & (positions > prompts)
        self._counted[slots[ready]] += 1
        return self._addresses[:, slots], ready.astype(np.int64)

    def seen(self, row: Row, last_token: torch.Tensor, index: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(prompt_seen, output_counts) of `row` over all its positions below start + count.

        `last_token` holds the token in flight, if the row has one, at `index`; None: at its slot. Drafts are added to a
        copy of the counts, since they may be refused.
        """
        total = row.start + row.num_scheduled - len(row.drafts)
        state = self.states.get(row.slot)
        if state is None or state.spec() is not row.spec or self._counted[row.slot] > total:
            state = _SlotState(
                ref(row.spec),
                torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device),
                torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device),
            )
            self.states[row.slot] = state
            self._counted[row.slot] = 0
            self._addresses[:, row.slot] = state.prompt_seen.data_ptr(), state.output_counts.data_ptr()
        if self._counted[row.slot] < total:
            self._extend(state, row, total, last_token[row.slot if index is None else index :][:1])
        if not row.drafts:
            return state.prompt_seen, state.output_counts
        guessed = self._ids(row.drafts)
        return state.prompt_seen, state.output_counts.index_add(0, guessed, self._one.expand(len(guessed)))

    def _extend(self, state: _SlotState, row: Row, total: int, in_flight: torch.Tensor) -> None:
        """Count new prompt tokens, output tokens and the token in flight. Progress is noted after each of these, so
        that a step that runs out of memory in between and is launched again counts no token twice."""
        known_end = total - row.in_flight
        prompt_len = row.spec.prompt_len
        counted = int(self._counted[row.slot])
        prompt = row.tokens[counted : min(known_end, prompt_len)]
        if prompt:
            seen = [token for token in prompt if token >= 0] if row.spec.images else prompt
            state.prompt_seen.index_fill_(0, self._ids(seen), True)
            self._counted[row.slot] = counted = counted + len(prompt)
        output = row.tokens[max(counted, prompt_len) : known_end]
        if output:
            self._count(state, self._ids(output))
            self._counted[row.slot] = counted = counted + len(output)
        if row.in_flight and counted <= known_end:
            self._count(state, in_flight)
        self._counted[row.slot] = total

    def _count(self, state: _SlotState, tokens: torch.Tensor) -> None:
        state.output_counts.index_add_(0, tokens, self._one.expand(len(tokens)))

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return upload(np.array(tokens, dtype=np.int64), self._device)


class SlotTables:
    """Tables of each slot's request on the device, and the rows' numbers that hold their addresses for kernels."""

    def __init__(self, params: SlotParams, vocab_size: int, device: torch.device) -> None:
        max_num_seqs = len(params.temperature)
        self.penalties = PenaltyTable(max_num_seqs, vocab_size, device)
        self._params, self._vocab_size, self._device = params, vocab_size, device
        self._ids: dict[int, tuple[torch.Tensor, ...]] = {}
        """Slot -> (biased token ids, their biases, stop ids that `min_tokens` may mask)."""
        self._addresses = np.zeros((5, max_num_seqs), dtype=np.int64)
        """For each slot the addresses of these and their numbers, in the order of `kernels.cuda.row_numbers`."""

    def forget(self, slot: int) -> None:
        """Drop the slot's tables, as it has another request. Idempotent."""
        self.penalties.forget(slot)
        self._ids.pop(slot, None)
        self._addresses[:, slot] = 0

    def numbers(
        self, rows: Sequence[Row], slots: Int64Array, positions: Int64Array, logit_rows: Int64Array,
        last_token: torch.Tensor, *, decodes: bool = False,
    ) -> tuple[Int64Array, list[torch.Tensor]]:  # fmt: skip
        """(int64 [NUMBERS, rows] as in `kernels.cuda.row_numbers`, without masks; tensors that must be kept until the
        kernels are queued).

        `positions`: of the tokens to be sampled. `logit_rows`: rows of the logits that are processed. `last_token`: the
        tokens in flight on the device, by slot. `decodes`: rows have one token each, which kernels count, and
        `last_token` is by logit row instead.
        """
        params = self._params
        numbers = np.zeros((n.NUMBERS, len(slots)), dtype=np.int64)
        numbers[[n.SLOT, n.POSITION, n.ROW]], numbers[n.MASK] = (slots, positions, logit_rows), -1
        kept: list[torch.Tensor] = []
        penalized = np.flatnonzero(params.penalized[slots])
        if penalized.size:
            penalized_slots = slots[penalized]
            numbers[[n.REPETITION, n.FREQUENCY, n.PRESENCE]] = (
                np.stack((params.repetition[slots], params.frequency[slots], params.presence[slots]))
                .astype(np.float64)
                .view(np.int64)
            )
            if decodes:
                prompts = params.prompt_len[penalized_slots]
                addresses, ready = self.penalties.counting(penalized_slots, positions[penalized], prompts)
                numbers[n.PROMPT, penalized], numbers[n.COUNTS, penalized] = addresses
                numbers[n.COUNT, penalized] = ready
            for index in penalized[numbers[n.COUNT, penalized] == 0].tolist():
                seen = self.penalties.seen(rows[index], last_token, int(logit_rows[index]) if decodes else None)
                numbers[[n.PROMPT, n.COUNTS], index] = [tensor.data_ptr() for tensor in seen]
                kept += seen
        held_open = positions < params.held_until[slots]
        for index in np.flatnonzero(held_open | params.biased[slots]).tolist():
            if rows[index].slot not in self._ids:
                self._write(rows[index])
        numbers[n.BIASED : n.NUM_STOPS + 1] = self._addresses[:, slots]
        numbers[n.NUM_STOPS] *= held_open
        return numbers, kept

    def _write(self, row: Row) -> None:
        biased = {token: bias for token, bias in row.spec.params.logit_bias.items() if token < self._vocab_size}
        stops = [token for token in row.spec.stop_ids if token < self._vocab_size]
        arrays = (
            np.array([*biased, 0], dtype=np.int64),  # one more each, as an empty tensor has no address
            np.array([*biased.values(), 0], dtype=np.float32),
            np.array([*stops, 0], dtype=np.int64),
        )
        ids = self._ids[row.slot] = tuple(upload(array, self._device) for array in arrays)
        biased_ids, biases, stop_ids = (tensor.data_ptr() for tensor in ids)
        self._addresses[:, row.slot] = biased_ids, biases, len(biased), stop_ids, len(stops)


class LogitProcessors:
    """All logit processors of one step's rows."""

    def __init__(
        self, rows: Sequence[Row], params: SlotParams, slots: Int64Array | list[int], masks: FilledMasks,
        vocab_size: int,
    ) -> None:  # fmt: skip
        self._params = params
        self._vocab_size = vocab_size
        slot_array = np.asarray(slots, dtype=np.int64)
        self.positions = np.array([row.start + row.num_scheduled for row in rows], dtype=np.int64)
        """[rows] positions of the tokens to be sampled."""
        processed = params.processed_at(slot_array, self.positions)
        processed[masks.samples] = True
        self.rows: list[int] = np.flatnonzero(processed).tolist()
        """Indices of the rows that are processed, ascending."""
        self._rows = [rows[row] for row in self.rows]
        self._slots, self._positions = slot_array[self.rows], self.positions[self.rows]
        self._masks = masks.among(self.rows)
        self.failed: dict[int, str] = {}
        """Row -> why one of its request's own processors failed."""

    def apply(self, logits: torch.Tensor, tables: SlotTables, last_token: torch.Tensor) -> torch.Tensor:
        """Processed logits float32 [len(self.rows), vocab], of the logits of these rows, which stay as they are."""
        if triton_missing(logits.device) is None:
            return self._by_kernel(logits, tables, last_token)
        logits = logits.to(torch.float32, copy=True)
        for index, row in enumerate(self._rows):
            if self._params.penalized[row.slot]:
                self._penalize(logits[index], row, tables.penalties, last_token)
        self._bias(logits)
        for row_index, row, row_logits in zip(self.rows, self._rows, logits, strict=True):
            for name, process in PROCESSORS.items():
                try:
                    if value := getattr(row.spec.params, name, None):
                        row_logits.copy_(process(value, row, row_logits))
                except Exception as error:  # the caller's function may raise anything; it ends its own request only
                    self.failed[row_index] = f"a logits processor failed: {error!r}"
        if self._masks.samples:
            apply_masks(logits, self._masks)
        self._hold_open(logits)
        return logits

    def _by_kernel(self, logits: torch.Tensor, tables: SlotTables, last_token: torch.Tensor) -> torch.Tensor:
        from asyncengine.kernels.api import gpu

        every = np.arange(len(self._rows))
        numbers, counted = tables.numbers(self._rows, self._slots, self._positions, every, last_token)
        numbers[n.MASK, self._masks.samples] = np.arange(len(self._masks.samples))
        masks = send(self._masks.packed, logits.device)
        processed = torch.empty(logits.shape, device=logits.device)
        gpu.process_logits(
            logits, processed, upload(numbers, logits.device), masks, -(-logits.shape[1] // 32), last_token
        )
        del counted  # not before the kernels are queued
        return processed

    def _bias(self, logits: torch.Tensor) -> None:
        entries = [
            (index, token, value)
            for index, row in enumerate(self._rows)
            for token, value in row.spec.params.logit_bias.items()
            if token < self._vocab_size
        ]
        if entries:
            where, ids, values = zip(*entries, strict=True)
            indices = upload(np.array((where, ids), dtype=np.int64), logits.device)
            added = upload(np.array(values, dtype=np.float32), logits.device)
            logits.index_put_((indices[0], indices[1]), added, accumulate=True)

    def _penalize(self, logits: torch.Tensor, row: Row, table: PenaltyTable, last_token: torch.Tensor) -> None:
        params, slot = self._params, row.slot
        prompt_seen, output_counts = table.seen(row, last_token)
        repetition = float(params.repetition[slot])
        if repetition != 1.0:
            penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(prompt_seen | (output_counts > 0), penalized, logits))
        if params.frequency[slot]:
            logits.sub_(output_counts * float(params.frequency[slot]))
        if params.presence[slot]:
            logits.sub_((output_counts > 0) * float(params.presence[slot]))

    def _hold_open(self, logits: torch.Tensor) -> None:
        """Mask stop ids before `min_tokens`, unless no other token is left: a grammar may allow only the end."""
        held_open = np.flatnonzero(self._positions < self._params.held_until[self._slots]).tolist()
        stops = [
            (position, token)
            for position, index in enumerate(held_open)
            for token in self._rows[index].spec.stop_ids
            if token < self._vocab_size
        ]
        if not stops:
            return
        index = upload(np.array(held_open, dtype=np.int64), logits.device)
        indices = upload(np.array(stops, dtype=np.int64), logits.device)
        before = logits[index]
        kept = before.index_put((indices[:, 0], indices[:, 1]), before.new_full((), float("-inf")))
        nothing = torch.isneginf(kept).all(dim=-1, keepdim=True)
        logits.index_copy_(0, index, torch.where(nothing, before, kept))
