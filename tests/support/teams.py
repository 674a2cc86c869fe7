"""Kernels called by a team of threads, in pieces as small as they get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncengine.kernels.cpu.team import Team


@contextmanager
def team_of(threads: int, piece: int = 1) -> Iterator[Team]:
    """Kernels called within share their loops among so many threads; `piece`: bytes of work in a piece at least."""
    from asyncengine.kernels.cpu.team import Team

    with closing(Team(threads, name="test-core", piece=piece)) as team, team.joined():
        yield team
