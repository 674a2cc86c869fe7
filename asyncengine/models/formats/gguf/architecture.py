"""The row of an architecture of llama.cpp's, and the names of tensors that many of them share.

Sources: gguf-py's tensor_mapping.py for names in files, transformers' modules for the others, llama.cpp's
convert_hf_to_gguf.py for what a converter changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.models.formats.gguf.header import Header

Order = NDArray[np.int64]


class TensorName(NamedTuple):
    """A tensor's name in a file: "blk.LAYER.STEM.SUFFIX"; the layer is None outside of layers, the suffix may be ""."""

    layer: int | None
    stem: str
    suffix: str

    def __str__(self) -> str:
        before = "" if self.layer is None else f"blk.{self.layer}."
        return f"{before}{self.stem}{self.suffix and '.'}{self.suffix}"


class Moved(NamedTuple):
    """Another order of a tensor's rows and columns.

    Row i of transformers' tensor is row `rows[i]` of the file's, which has `total` rows (0: as many as `rows`).
    Column i of the file's is column `columns[i]` of transformers'.
    """

    rows: Order | None = None
    total: int = 0
    columns: Order | None = None


class Rope(NamedTuple):
    """Rotary embeddings as far as a header may leave them out: base, linear factor, type of a scaling that has only a
    factor; what `rope_parameters` of YaRN has beside; the base of layers with a window, if it is another."""

    base: float = 10000.0
    factor: float = 0.0
    kind: str = ""
    yarn: Mapping[str, Any] = {}
    local: float | None = None


def each(name: str, there: str, parts: str) -> dict[str, str]:
    """Names that differ in one part: `each("attn_{}", "self_attn.{}_proj", "q k v")`."""
    return {name.format(part): there.format(part) for part in parts.split()}


FEED_FORWARD = each("ffn_{}", "mlp.{}_proj", "gate up down")
LLAMA: Mapping[str, str] = {
    "attn_norm": "input_layernorm", **each("attn_{}", "self_attn.{}_proj", "q k v"), "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", **FEED_FORWARD,
}  # fmt: skip
"""Tensors of a layer: stem in a file -> name of the module in transformers.

"[]" in a name stands for the index of the first axis: such a tensor is several there (experts, norms of heads). "#0"
and "#1" behind it make it the first or second part of that tensor, "#" the only one (see `Architecture.join`).
"""
HEAD_NORMS = {**LLAMA, **each("attn_{}_norm", "self_attn.{}_norm", "q k")}
QWEN_MOE = {
    **HEAD_NORMS, **each("ffn_{}_exps", "mlp.experts.[].{}_proj", "gate up down"),
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **each("ffn_{}_shexp", "mlp.shared_expert.{}_proj", "gate up down"),
}  # fmt: skip
GRANITE_KEYS = "attention_multiplier embedding_multiplier residual_multiplier logits_scaling"
OUTER: Mapping[str, str] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}  # fmt: skip
"""Stems that stand for several, one below the other: llama.cpp's converter makes them if it is told so
(`--fuse-qkv`, `--fuse-gate-up-exps`), and Ollama's first gpt-oss has the former."""
_PARAMETERS = ("sinks", "expert_bias", "e_score_correction_bias", "dt_bias", "A_log", "D")
"""Parameters that a module has itself: transformers adds no suffix; files have ".weight", ".bias" or none."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: its model type and class in transformers, and how to come there from a file."""

    model_type: str
    causal: str
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    keys: str = ""
    """Keys of config.json that `config.READERS` reads, and KEY=True or KEY=False for what is always so."""
    more: Callable[[Header], Mapping[str, Any]] = lambda header: {}
    """Further content of config.json."""
    norm: str = "rms_norm_eps"
    """Key of the norms' epsilon; "" where there is none, or `more` has it."""
    attention: Literal["rotated", "unrotated", "latent", "none"] = "rotated"
    """"rotated" reads rotary values and the length of a head, "unrotated" the latter, the others neither."""
    partial: bool = False
    """Heads may be rotated in part."""
    rope: Callable[[Header], Rope] = lambda header: Rope()
    norm_offset: float = 0.0
    """Number that the converter adds to the weights of norms."""
    moved: Callable[[Header, TensorName, int], Moved | None] = lambda header, name, rows: None
    """Order of a tensor of so many rows. Raises `ValueError` for a number of rows that cannot be."""
    state: str = ""
    """Keys of config.json for the `StateSizes`, in their order."""
    decay_shape: tuple[int, ...] = (-1,)
    """Shape of the states' decay in transformers."""
    join: Literal["turns", "below", "latent"] = "below"
    """Joined tensors: rows of both parts in turns, and inputs before outputs; of each expert, the second part below the
    first; of each head, the second below the first, which is transposed in the file."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FUSED)
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    """Tensors outside of layers, as `layer`."""
    prefix: str = "model.layers.{}."
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Keys of the header with a number for each layer that is a tensor in transformers: (name, shape)."""

    def name_of(self, name: TensorName) -> tuple[str, str] | None:
        """A tensor's name in transformers' checkpoint and its part ("", "#", "#0" or "#1"); None: it has none."""
        found = (self.outer if name.layer is None else self.layer).get(name.stem)
        if found is None:
            return None
        there, mark, part = found.partition("#")
        before = "" if name.layer is None else self.prefix.format(name.layer)
        if self.join == "turns" and mark and name.suffix:  # a parameter of the module of all experts
            return f"{before}{there}{'_bias' if name.suffix == 'bias' else ''}", mark + part
        if there.rpartition(".")[2] in _PARAMETERS:
            return before + there, ""
        suffix = name.suffix or ("weight" if name.stem.endswith("_norm") else "")  # Falcon-H1's norms have none
        return (f"{before}{there}.{suffix}", mark + part) if suffix else None


def split_name(name: str) -> TensorName | None:
    """A tensor's name taken apart; None for a name that no converter gives."""
    stem, dot, suffix = name.rpartition(".")
    if not dot or suffix not in ("weight", "bias"):
        stem, suffix = name, ""
    if not stem.startswith("blk."):
        return TensorName(None, stem, suffix)
    number, _, inner = stem.removeprefix("blk.").partition(".")
    if not (number.isascii() and number.isdecimal() and len(number) < 6 and str(int(number)) == number):
        return None
    return TensorName(int(number), inner, suffix)


def halves(header: Header, name: TensorName, rows: int) -> Moved | None:
    """Queries and keys: neighbours rotate together in a file, the halves of a head do in transformers."""
    if name.stem not in ("attn_q", "attn_k"):
        return None
    heads = header.whole("attention.head_count")
    if name.stem == "attn_k":
        heads = header.whole("attention.head_count_kv", heads)
    if not heads or rows % (2 * heads):
        raise ValueError(f"{rows} rows for {heads} heads")
    return Moved(np.arange(rows, dtype=np.int64).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows))
