"""Meanings of adapter names, inside the registry and for callers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """One content, and where it was read."""

    name: str
    path: str
    digest: str
    """Identity: sha256 hex over what the weights do, not over names or paths."""
    rank: int
    """The largest of its modules."""
    nbytes: int
    """Host memory it takes while it is there."""
    modules: tuple[str, ...]
    """Hugging Face paths of what it changes."""
    pinned: bool
    """Never dropped from memory."""


@dataclass(frozen=True, slots=True)
class AdapterInfo(Meaning):
    """One loaded adapter, for people and programs."""

    in_memory: bool
    """False: it was dropped to make room, and is read again when a request needs it."""
    requests: int
    """Requests that use this content now, waiting or running."""
