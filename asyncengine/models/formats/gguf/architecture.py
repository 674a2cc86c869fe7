"""What is known of one of llama.cpp's architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncengine.models.formats.gguf import names
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.names import TensorName
from asyncengine.models.formats.gguf.undo import Undo

Fields = Mapping[str, Any]
"""Of a configuration."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures."""

    model_type: str
    """transformers' name of the family."""
    causal: str
    """transformers' class."""
    layer: Mapping[str, str] = field(default_factory=lambda: names.LLAMA)
    norm: str = "rms_norm_eps"
    """Where the configuration has the norms' epsilon."""
    layer_norm: bool = False
    """Its epsilon is that of layer norms, not of RMS norms."""
    epsilon: float | None = None
    """Where a header says none; None: it must."""
    paired: bool = False
    """Rows of queries and keys lie so that neighbours rotate together; transformers has the halves of a head."""
    norm_offset: float = 0.0
    """Was added to the weights of norms."""
    partial: bool = False
    """Heads may be rotated in part."""
    outer: Mapping[str, str] = field(default_factory=lambda: names.OUTER)
    """Of no layer, as `layer`."""
    prefix: str = names.LAYER
    """Of a layer's names in transformers."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: names.FUSED)
    """Names of the file that stand for several."""
    hybrid: bool = False
    """Layers without attention have no heads of keys."""
    attention: Literal["rotated", "unrotated", "latent", "none"] = "rotated"
    """Whether a header's rotary values mean something, and its lengths of heads; "none": no layer attends."""
    undo: Callable[[Header, TensorName], Undo | None] = lambda header, name: None
    """What else its converter did to a tensor."""
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Of the header, that are tensors of every layer in transformers: (name, shape)."""
    more: Callable[[Header], Fields] = lambda header: {}
    """What else the configuration says."""
