"""One step: its work (`Batch` of `Row`s) and its outcome (`StepResult`). A `seams.Executor` computes it.

No torch here: the same batch feeds a model on any device of this process, or the fake runner. The scheduler makes
batches, the executor reads them; neither imports the other, both import this.

Sharing rule: `Row.tokens`, `Row.pages` and those of `Row.window` are the request's live lists, passed without copying.
The scheduler only ever *appends* to them or *replaces* them by a new list; a runner reads at most the first `start +
num_scheduled` tokens and the pages that cover them, so a step in flight never sees a change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncengine.images import PromptImage
from asyncengine.request_spec import RequestSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from asyncengine.seams import GrammarMatcher


OPEN = -1
"""A guess that the executor of the step is to make, if it can."""
MEASURED_SIZES = (1, 2, 8, 32)
"""Tokens of the steps whose costs an executor measures; nothing is drafted in longer ones. Some kernels take a token in
another way than two, so that longer steps do not tell what the second one costs."""
DRAFT_CATCH_UP = 128
"""Positions that the draft model computes for a row in one step, at most: one that is further behind has to wait."""


class StateUse(NamedTuple):
    """One row's use of recurrent states (`layers.states`), where a model keeps any. Slots are numbered from 1."""

    slot: int
    """The request's own: the state after the row's last position is written there. No other row reads it."""
    source: int
    """The state before the row's first position: its own, a snapshot's, or 0, the state before any token."""
    saves: tuple[tuple[int, int], ...] = ()
    """(position, slot) of snapshots to take: the state before that position, `start` < position <= its end but for
    drafts, ascending. The slot is the request's until the step has retired."""
    guesses: tuple[int, ...] = ()
    """Slots for the state before each of the row's drafts, in order: what the request goes on from if that draft is the
    first wrong one. They are the request's until the step has retired."""


class WindowPages(NamedTuple):
    """A row's pages in layers with windows that have pages of their own."""

    first: int
    """No position from the row's `start` on sees a page before this one."""
    pages: list[int]
    """Position p lies in pages[p // page_size - first]."""


class Row(NamedTuple):
    """One request's share of one step: compute positions [start, start + num_scheduled)."""

    spec: RequestSpec
    slot: int
    """Persistent row of device-side state (last token, penalties, seed), in [0, max_num_seqs)."""
    start: int
    num_scheduled: int
    tokens: list[int]
    """The request's tokens, prompt then output; positions [start, start + num_scheduled) are this row's input."""
    in_flight: bool
    """True: the last input token is the one an earlier launched step samples for this slot; not in `tokens` yet.

    If a grammar then makes something else of that token (replaces it, forces others behind it), the row is discarded:
    its matcher is not touched, and whatever is computed for it is thrown away."""
    pages: list[int]
    """Page table: position p lives in page pages[p // page_size] at offset p % page_size. Page 0: no layer sees it."""
    samples: bool
    """True: sample one token after the last position, or, of a request that is asked for a vector, pool it. False: an
    inner chunk of a prompt."""
    adapter_slot: int = 0
    """0 = no adapter."""
    grammar: GrammarMatcher | None = None
    state: StateUse | None = None
    """None: the model keeps none."""
    window: WindowPages | None = None
    """None: `pages` are those of all layers."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens after `tokens`: inputs of the row's last positions. A token is sampled at the position
    before them and at each of them, from what would be the prefix there; those behind the first wrong guess say
    nothing. Such a row has no token in flight, and none of its request is launched behind it. All may be `OPEN`: then
    there will be as many guesses as the executor makes, at most so many."""

    @property
    def pools(self) -> bool:
        """True: it ends the prompt of a request that is asked for a vector."""
        return self.samples and self.spec.pooled is not None

    @property
    def awaits_drafts(self) -> bool:
        """True: a draft model is to make its guesses."""
        return bool(self.drafts) and self.drafts[0] == OPEN

    @property
    def moves_state(self) -> bool:
        """True: the state that it starts from is overwritten, so that it cannot be run twice."""
        return self.state is not None and self.state.source == self.state.slot


def sampling_places(row: Row) -> list[Row]:
    """A row that samples, as one for each token that it samples: each ends where its token is sampled from."""
    if not row.drafts:
        return [row]
    first = row.num_scheduled - len(row.drafts)
    return [
        row._replace(num_scheduled=first + count, drafts=row.drafts[:count]) for count in range(len(row.drafts) + 1)
    ]


def first_scored(row: Row) -> int:
    """Position of the first prompt token that a row with `prompt_logprobs` may score; its logits are those of the
    position before."""
    return max(row.start + 1, row.spec.params.prompt_logprobs_start)


class AdapterSwap(NamedTuple):
    """A device slot gets another adapter before the step that carries this. No step in flight names the slot."""

    slot: int
    digest: str
    weights: Any = None
    """Weights that the runner copies: opaque to all other code, and kept alive by the batch."""


class Encode(NamedTuple):
    """A picture is encoded before the rows of the step that carries this, and kept until a later one drops it."""

    image: PromptImage
    dropped: tuple[bytes, ...] = ()
    """Digests of pictures that no row names from here on."""


class Batch(NamedTuple):
    """One step. Rows keep the scheduler's order; `step` counts launched steps from 1."""

    step: int
    rows: tuple[Row, ...]
    swaps: tuple[AdapterSwap, ...] = ()
    encode: Encode | None = None
    copies: tuple[tuple[RecordType, int, int], ...] = ()
    """(type of page, page, the one that becomes a copy of it), made before anything is computed."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled for row in self.rows)


class TokenLogprob(NamedTuple):
    """Log-probability of one token and, if asked for, of the likeliest alternatives (descending)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ConstrainedToken(NamedTuple):
    """The outcome of a row's last sampled token in its grammar, as of that token: later rows move the matcher on."""

    replaced: bool
    """Another token stands in its place."""
    complete: bool
    """The output is complete and nothing may follow."""
    steered_from: int | None
    """`GrammarMatcher.steered_from`, so far."""
    forced: int = 0
    """The number of the row's tokens that were not sampled: the grammar left no choice."""


@dataclass(slots=True)
class StepResult:
    """The results of a step, by row index of its batch."""

    step: int
    tokens: list[int]
    """First token per row; -1 where the row did not sample or failed."""
    further: dict[int, list[int]] = field(default_factory=dict)
    """Row -> the tokens after it: drafts that were right and what was sampled behind them, and tokens about which its
    grammar leaves no choice (jump-forward, SGLang)."""
    accepted: dict[int, int] = field(default_factory=dict)
    """Each row with drafts -> how many of them are its first tokens: so far what it computed holds."""
    drafted: dict[int, int] = field(default_factory=dict)
    """Each row with drafts -> how many there were, of those left open too."""
    constrained: dict[int, ConstrainedToken] = field(default_factory=dict)
    """Each row with a grammar and a token."""
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Row -> of each of its tokens."""
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Row -> log-probabilities of prompt tokens at positions start+1 .. start+num_scheduled, inside the prompt."""
    traces: dict[int, NDArray[Any]] = field(default_factory=dict)
    """Row -> what its request asks to be told of its positions from `start` on (`Sample.routed_experts` or
    `hidden_states`), but for drafts that were wrong."""
    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """Row -> what was pooled of its request, of rows that end one which is asked for a vector (`Row.pools`)."""
    errors: dict[int, str] = field(default_factory=dict)
    """Row -> why this one request failed. The others in the batch are unaffected."""
    lost: list[int] = field(default_factory=list)
    """Rows of which nothing was computed, and whose states are gone: a step that had begun to move them could not be
    run to its end. Their requests start again from a snapshot, the snapshots of these rows are none."""
    seconds: float = 0.0
    """Time the device worked on it."""

    def put(self, index: int, row: Row, produced: Sequence[int]) -> None:
        """Note the tokens of a row of this index: at least one."""
        self.tokens[index] = produced[0]
        if len(produced) > 1:
            self.further[index] = list(produced[1:])
        if row.drafts:
            self.accepted[index] = num_agreed(row.drafts, produced)
            self.drafted[index] = len(row.drafts)


def num_agreed(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of `drafts` that are the first of `tokens`."""
    most = min(len(drafts), len(tokens))
    for count in range(most):
        if drafts[count] != tokens[count]:
            return count
    return most


class RecordType(IntEnum):
    """The type of a record of a prefix: the memory that it holds."""

    PAGE = 1
    WINDOW = 2
    STATE = 3
    ABOUT = 4
    """No memory, but the description at the head of a stream of records (`kvcache.store.prefix_stream`)."""


class FinishedStep(NamedTuple):
    """A `StepHandle` of a step that was computed when it was launched."""

    result: StepResult
    ready: bool = True

    def block(self) -> None:
        return

    def wait(self) -> StepResult:
        return self.result
