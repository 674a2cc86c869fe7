"""A loaded adapter: weights by module, in host memory, identified by their content; and the facts that names give."""

from __future__ import annotations

from dataclasses import dataclass

from asyncengine.seams import LoraWeights


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """One adapter as loaded. Immutable: changed content is another adapter with another digest."""

    name: str
    """The name under which it was first loaded, for messages: requests, caches and slots go by `digest`."""
    digest: str
    """sha256 (hex) over the files' scalings and tensors as stored; not over names, paths or the model."""
    rank: int
    """The largest rank among its modules."""
    modules: dict[str, LoraWeights]
    """Module path -> weights, sorted by path."""
    nbytes: int
    """Host memory of all weights as they are held."""
    invocation: tuple[int, ...] = ()
    """Activated LoRA: the adapter acts from the last occurrence of these tokens in the prompt on; (): everywhere."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The content that a name refers to, and the folder it was read from."""

    name: str
    path: str
    digest: str
    """Its identity, as `Adapter.digest`."""
    rank: int
    """The largest rank among its modules."""
    nbytes: int
    """Bytes of host memory while it is loaded."""
    modules: tuple[str, ...]
    """Hugging Face paths of the modules that it changes."""
    pinned: bool
    """It is never evicted from host memory."""


@dataclass(frozen=True, slots=True)
class AdapterInfo(Meaning):
    """One loaded adapter as `list` shows it."""

    in_memory: bool
    """False: it was evicted, and is read again when a request needs it."""
    requests: int
    """Requests that use this content now, waiting or running."""
