"""A loaded adapter: weights by module, in host memory, identified by what they contain; what names mean."""

from __future__ import annotations

from dataclasses import dataclass

from asyncengine.seams import LoraWeights


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter as loaded. Never changed: changed content is another adapter with another digest."""

    name: str
    """The name under which it was first loaded. For people only: requests, caches and slots go by `digest`."""
    digest: str
    """sha256 hex over what the files say (scalings and tensors as stored); never over names, paths or the model."""
    rank: int
    """The largest rank among its modules."""
    modules: dict[str, LoraWeights]
    """Module path -> weights, sorted by path."""
    nbytes: int
    """Host memory of all weights as they are held."""
    invocation: tuple[int, ...] = ()
    """Tokens of a prompt from whose last place on it acts (activated LoRA); none: it acts everywhere."""


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
