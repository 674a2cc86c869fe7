"""The pooling that a model asks for: modes, the modules behind it, prompts, lengths, labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Task = Literal["generate", "embed", "rerank", "classify"]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Ways to make one vector of hidden states; the vectors of several modes are concatenated."""
ACTIVATIONS = ("identity", "sigmoid", "tanh", "softmax", "relu", "gelu", "silu")


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer behind the pooling."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "tanh"
    residual: bool = False
    """The input is added to the output."""


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """The way from hidden states to vectors or scores, and the form that texts must have."""

    task: Task
    modes: tuple[str, ...] = ("mean",)
    """Empty: a classification head pools by itself."""
    include_prompt: bool = True
    """False: a prompt's positions are left out of the pooling."""
    whole: bool = False
    """The model is an encoder, whose tokens see those after them: a text is computed in one step."""
    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = None
    """Tokens; longer texts are cut. None: as the tokenizer and the model say."""
    lower_case: bool = False
    labels: tuple[str, ...] = ()
    """Labels of a classification head, in order."""
    activation: str = "identity"
    """Activation of scores."""
    tokens: tuple[int, ...] = ()
    """(true, false) token ids; empty: those of "yes" and "no"."""
    scores_tokens: bool = False
    """The score is the logit of the true token less that of the false one, at the last position."""

    @property
    def every(self) -> bool:
        """Whether hidden states of other positions than the last are needed."""
        return self.whole or any(mode != "lasttoken" for mode in self.modes)

    def in_words(self) -> str:
        """A description like "mean, dense 384 -> 128, normalized"."""
        parts = ["logit of a token" if self.scores_tokens else " + ".join(self.modes) or "classification head"]
        parts += [f"dense {layer.inputs} -> {layer.outputs}" for layer in self.dense]
        return ", ".join(parts + ["normalized"] * self.normalize)
