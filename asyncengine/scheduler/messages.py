"""Everything that can be posted to an engine. The scheduler's world changes only by these, between steps.

A new request is posted as its specification, nothing around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from asyncengine.request_spec import RequestSpec
from asyncengine.seams import GrammarMatcher


class Abort(NamedTuple):
    """The consumer of `ticket` has left. Unknown and finished tickets are ignored."""

    ticket: int


class StopText(NamedTuple):
    """The text of `ticket` is complete (a stop string matched); its request ends with reason "stop"."""

    ticket: int


class Suspend(NamedTuple):
    """The consumer of `ticket` has as much unread output as it may: the request leaves the steps until `Resume`."""

    ticket: int


class Resume(NamedTuple):
    """The consumer of `ticket` reads again. `at`: the clock reading from which the time to its next token counts."""

    ticket: int
    at: float


class GrammarReady(NamedTuple):
    """The grammar of `ticket` compiled, or failed with `error`: that ends the one request.

    An error that is an exception is what the caller's call raises.
    """

    ticket: int
    matcher: GrammarMatcher | None = None
    error: Exception | str | None = None


class AdapterReady(NamedTuple):
    """The adapter that `ticket` claimed, known by its `digest`, is in host memory, or could not be loaded."""

    ticket: int
    digest: str = ""
    error: Exception | str | None = None
    invocation: tuple[int, ...] = ()
    """The tokens of a prompt from which on it acts; none: it acts everywhere."""


class Drain(NamedTuple):
    """No more requests will come. `deadline`: clock reading at which what still runs is aborted; None: never."""

    deadline: float | None = None


class PrefixFound(NamedTuple):
    """The first `pages` pages of `ticket`, those in the cache included, are filled by `read` sooner than they are
    computed; 0: none are. The request waits for that until the clock reads `until`."""

    ticket: int
    pages: int
    until: float = 0.0
    read: Callable[..., None] | None = None
    """Function that the `RestoreOrder` is for (`engine.prefix_sources.Hit`)."""


class PrefixLoaded(NamedTuple):
    """The reading of this `number` has ended: it filled the first `pages` of its pages, and perhaps the state after the
    last of them."""

    number: int
    pages: int
    state: bool = False


class ImportPrefix(NamedTuple):
    """Pages are wanted for `tokens`, full pages of the namespace of `adapter_digest` and `salt`, which a file has.
    Answered by a `RestoreOrder` of this `number`."""

    number: int
    adapter_digest: str
    """"": no adapter."""
    salt: str
    tokens: tuple[int, ...]


UpdateMode = Literal["wait", "recompute"]
"""Whether requests end before the model's weights change, or go on with the new ones (`scheduler.weight_updates`)."""


class UpdateWeights(NamedTuple):
    """The model's weights are to change, by the update of this `number`."""

    number: int
    mode: UpdateMode = "wait"


PauseMode = Literal["finish", "keep", "abort"]
"""Whether requests end before the engine pauses, stay where they are, or are aborted."""


class Pause(NamedTuple):
    """No step is to run after those of requests that `mode` lets end, until the engine resumes. In one order with
    weight updates, by a `number` of the same."""

    number: int
    mode: PauseMode = "finish"


class ResetPrefixCache(NamedTuple):
    """All that is cached with the cache salt `salt` (None: with any) and used by no request is dropped. Answered under
    this `number`, of the same as those of weight updates."""

    number: int
    salt: str | None = None


class WithdrawUpdate(NamedTuple):
    """The update, pause or reset of this `number` is not wanted any more. Ignored if it has happened."""

    number: int


class PinPrefix(NamedTuple):
    """The prompt of `ticket`, which comes next, is to stay in the cache when its request ends (`KVCache.pin`)."""

    ticket: int


class UnpinPrefix(NamedTuple):
    """The prompt of `ticket` need not stay any longer. Ignored if it is not pinned."""

    ticket: int


class SessionEvent(NamedTuple):
    """News of a session: it is to be closed `seconds` after its last request, or will be back then, or is closed."""

    name: str
    what: Literal["open", "waiting", "close"]
    at: float = 0.0
    """Clock reading."""
    seconds: float = math.inf


Message = (
    RequestSpec | Abort | StopText | Suspend | Resume | GrammarReady | AdapterReady | PrefixFound | PrefixLoaded | Drain
    | UpdateWeights | Pause | ResetPrefixCache | WithdrawUpdate | PinPrefix | UnpinPrefix | ImportPrefix | SessionEvent
)  # fmt: skip

EndReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Why the scheduler ended a request."""
