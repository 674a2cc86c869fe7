"""The protocol of scheduling policies: who is admitted first, who takes whose place, and who gives way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncengine.scheduler.request import Request


class Policy:
    """A rule by which requests share an engine. A policy of one's own inherits from it and has a `name` and a `key`.

    Requests are there to be read: `spec` (its `options`, `params`, `prompt`, `max_total`), `tokens` (prompt and output
    so far), `ticket` (in order of arrival). Each engine works with a deep copy of the object that it is given. It must
    be deterministic, so it asks no clock (a request's age: tokens that `charge` counted since `arrive`), and an
    exception in it ends the engine. Whatever it says, a request passed over `max_passes` times goes before all that are
    not, and gives way last.
    """

    name: str
    key: Callable[[Request], Any]
    """Sort key of a waiting request, smallest first; arrival decides among equals."""
    dynamic = False
    """Keys change between steps: the queue is sorted anew, after `prepare`, whenever a request may start."""
    prefix_hints = False
    """`key` wants to know `request.prefix_hint`, the tokens of it that are cached. Needs `dynamic`."""

    def victim_key(self, request: Request) -> Any:
        """Sort key of a running request: the largest gives way first, of equals the last arrived."""
        return 0

    def preempts(self, request: Request, victim: Request) -> bool:
        """Whether waiting `request` takes the place of running `victim` if there is no other: a strict order."""
        return False

    def flow(self, request: Request) -> Hashable:
        """The line that it stands in: `max_passes` counts who overtakes it there. Separate lines are for a policy that
        itself lets none of them wait for ever."""
        return None

    def prepare(self, waiting: Iterable[Request]) -> None:
        """Keys of `waiting` will be asked for."""

    def arrive(self, request: Request) -> None:
        """`request` has come; before its first `key`. It does not come again after preemption."""

    def charge(self, request: Request, tokens: int) -> None:
        """A step that is launched computes `tokens` of its tokens, or as many guesses were right."""

    def leave(self, request: Request) -> None:
        """`request` has ended."""


def overrides(policy: Policy, name: str) -> bool:
    """Whether `policy` overrides the method `name`."""
    return getattr(type(policy), name, None) is not getattr(Policy, name)


def victim_rank(policy: Policy) -> Callable[[Request], Any]:
    """The order of running requests in which the last gives way first.

    Where `victim_key` is fixed the first is never a victim and runs to its end, so that preemption cannot go on for
    ever. Where it is not, admission leaves each request room to advance: between two preemptions one gets a token.
    """
    key = policy.victim_key
    return lambda request: (not request.overdue, 0 if request.overdue else key(request), request.ticket)
