"""One sample of one request: its tokens, its progress, and the only table of its legal state changes."""

from __future__ import annotations

from enum import Enum

from asyncengine.errors import GrammarError, InvariantViolation
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.radix_tree import Branches
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.allowed_tokens import AllowedTokens
from asyncengine.seams import GrammarMatcher


class RequestState(Enum):
    """State of a request. `WAITING` with `preemptions > 0` has run before and keeps its tokens."""

    GRAMMAR_QUEUE = "grammar_queue"
    """Its grammar is compiling; others proceed."""
    ADAPTER_QUEUE = "adapter_queue"
    """Its adapter is loading; others proceed."""
    RESTORE_QUEUE = "restore_queue"
    """The beginning of its prompt is being read from a disk, or looked up there; others proceed."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_S = RequestState
LEGAL_TRANSITIONS: dict[RequestState, tuple[RequestState, ...]] = {
    _S.GRAMMAR_QUEUE: (_S.ADAPTER_QUEUE, _S.WAITING, _S.FINISHED),
    _S.ADAPTER_QUEUE: (_S.WAITING, _S.FINISHED),
    _S.RESTORE_QUEUE: (_S.WAITING, _S.FINISHED),
    _S.WAITING: (_S.RESTORE_QUEUE, _S.RUNNING, _S.FINISHED),
    _S.RUNNING: (_S.WAITING, _S.FINISHED),
    _S.FINISHED: (),
}


class Request:
    """The scheduler's record of one sample: its specification, and how far it has come.

    Progress is three counters over `tokens` (prompt, then output): positions below `num_computed` have keys and
    values in committed pages, positions below `num_launched` are being computed by launched steps, and
    `num_pending` tokens beyond `tokens` are being sampled by launched steps. A step hands out work so that
    `num_launched` catches up with `len(tokens) + num_pending`: prompts, chunks, decodes and resumption after
    preemption are all that one case (vLLM V1).
    """

    __slots__ = (
        "adapter_digest", "adapter_from", "adapter_slot", "branches", "cached_tokens", "discard_until",
        "drafts_launched", "epoch", "first_step_at", "last_step", "last_token_at", "matcher", "num_computed",
        "num_kept", "num_launched", "num_pending", "num_updates", "overdue", "passes", "predicted", "preemptions",
        "prefix_hint", "restored_tokens", "restores", "slot", "spec", "state", "suspended", "table", "tokens",
    )  # fmt: skip

    def __init__(self, spec: RequestSpec) -> None:
        self.spec = spec
        self.tokens = [*spec.prompt, *spec.resumed]
        ready = RequestState.WAITING if spec.options.adapter is None else RequestState.ADAPTER_QUEUE
        self.state = ready if spec.params.grammar is None else RequestState.GRAMMAR_QUEUE

        self.table: PageTable | None = None
        """None while it does not run, and of one that keeps nothing (`RequestSpec.whole`)."""
        self.slot = -1
        self.adapter_slot = 0
        self.adapter_digest = ""
        """Digest of its adapter's content, once that is in memory; "" for none."""
        self.adapter_from: int | None = None
        """The position from which on its adapter acts, where that is said by invocation tokens; None: everywhere."""
        self.branches: Branches | None = None
        """Branches of its session; None: it belongs to none."""
        self.matcher: GrammarMatcher | None = None
        if spec.params.allowed_token_ids is not None:
            self.matcher = AllowedTokens(spec.params.allowed_token_ids)

        self.num_computed = 0
        self.num_launched = 0
        self.num_pending = 0
        self.num_kept = len(self.tokens) if spec.resumed else 0
        """Tokens it had, or was to get from launched steps, when it was last preempted."""
        self.epoch = 0
        """Counts admissions; a result of an earlier epoch says nothing about the pages of this one."""
        self.last_step = 0
        """Last launched step that names this request: the fence for giving its pages back."""

        self.discard_until = 0
        """Results of launched steps up to this one say nothing: its grammar changed a token they were launched for."""
        self.drafts_launched = 0
        """Guessed tokens that a launched step computes beyond `num_launched`: what comes of them is awaited."""
        self.predicted = (0, 0)
        """Tokens of its caller's guess that were right, and that were computed and wrong; known when it has ended."""

        self.cached_tokens = 0
        self.restores = 0
        """Readings of its prefix from a disk that it has waited for."""
        self.restored_tokens = 0
        """Tokens that these put into the cache; from its first admission on, those of `cached_tokens`."""
        self.passes = 0
        self.overdue = False
        self.preemptions = 0
        self.suspended = False
        """It waits, in state WAITING, for its consumer to read (`Roster.suspended`)."""
        self.prefix_hint = 0
        self.num_updates = 0
        """Updates of the weights that had been asked for when it came."""
        self.first_step_at: float | None = None
        self.last_token_at = spec.arrival

    @property
    def ticket(self) -> int:
        return self.spec.ticket

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.spec.prompt)

    @property
    def keys(self) -> list[int]:
        """`tokens` as the prefix cache knows them, in which an adapter that does not act everywhere marks where it
        begins, as pictures have ids of their own (`asyncengine.images`): the keys before it are the base model's."""
        if self.adapter_from is None:
            return self.tokens
        keys = self.tokens.copy()
        keys[self.adapter_from] = -(int(self.adapter_digest[:32], 16) + 1 << 32) - keys[self.adapter_from]
        return keys

    def use_adapter(self, digest: str, invocation: tuple[int, ...]) -> None:
        """Note that its adapter is in memory. One with `invocation` tokens acts from their last occurrence in the
        prompt on, and not at all if there is none (activated LoRA, Greenewald et al. 2025)."""
        if invocation:
            prompt, count = self.spec.prompt, len(invocation)
            starts = (at for at in reversed(range(len(prompt))) if prompt[at] == invocation[0])
            self.adapter_from = next((at for at in starts if prompt[at : at + count] == invocation), None)
        if not invocation or self.adapter_from is not None:
            self.adapter_digest = digest

    def with_one_adapter(self, count: int) -> int:
        """Number of the next `count` positions that are all before the adapter acts, or all behind."""
        before = 0 if self.adapter_from is None else self.adapter_from - self.num_launched
        return min(count, before) if before > 0 else count

    def catch_up(self, matcher: GrammarMatcher) -> str | None:
        """Take the matcher of its grammar past the output it already has. Returns the fault, or None."""
        self.matcher = matcher
        try:
            moved = [token for past in self.spec.resumed for token in matcher.accept(past, False)]
        except GrammarError as error:
            return str(error)
        if self.spec.resumed_steered:  # which the tokens do not show
            matcher.steered_from = 0
        return None if moved == [*self.spec.resumed] else "its grammar does not take the output it already has"

    def discard_launched(self) -> None:
        """Forget steps launched after the token now known: they were launched for another one, and must be again."""
        self.discard_until = self.last_step
        self.num_pending = 0
        self.num_launched = self.num_computed

    def move(self, state: RequestState) -> None:
        if state not in LEGAL_TRANSITIONS[self.state]:
            raise InvariantViolation(f"request {self.ticket}: {self.state.value} -> {state.value} is not legal")
        self.state = state

    def __repr__(self) -> str:
        return f"Request({self.ticket}, {self.state.value}, {self.num_computed}/{len(self.tokens)})"
