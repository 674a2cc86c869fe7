"""A loaded adapter: low-rank weights by module, in host memory, identified by what they contain; what names mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """Low-rank weights for one module of the base model: `y += (x @ a.T) @ b.T` (Hu et al. 2021).

    Ready to be copied into a device slot: on the host, contiguous, finite, in the model's dtype, with everything the
    product is multiplied by folded into `b`: lora_alpha / r, or lora_alpha / sqrt(r) where rslora was used, and the
    module's own scale. An embedding has the same shapes with `in` = rows of its table, so that row t gains
    `b @ a[:, t]` (PEFT's `lora_embedding_A`, `lora_embedding_B`).
    """

    module: str
    """Hugging Face path inside the base model, e.g. "model.layers.0.self_attn.q_proj", "lm_head"."""
    a: torch.Tensor
    """[r, in]."""
    b: torch.Tensor
    """[out, r]."""
    embedding: bool = False
    """True: the module is a lookup table, `a` is indexed by token."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


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
