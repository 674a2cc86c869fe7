"""Tensor names in GGUF files, and the names in transformers' checkpoints that they stand for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple


class TensorName(NamedTuple):
    """A tensor's name in a file, "blk.LAYER.STEM.SUFFIX". `layer` is None outside of layers; `suffix` may be ""."""

    layer: int | None
    stem: str
    suffix: str

    def __str__(self) -> str:
        before = "" if self.layer is None else f"blk.{self.layer}."
        return f"{before}{self.stem}{self.suffix and '.'}{self.suffix}"


NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,4})\.)?(?!blk\.)(.+?)(?:\.(weight|bias))?", re.DOTALL)
"""Pattern of tensor names that converters write: layer, stem and suffix."""


def read_tables(file: str) -> Mapping[str, Mapping[str, str]]:
    """The tables of names in a file of this package, by title."""
    tables: dict[str, dict[str, str]] = {}
    text = (resources.files(__package__) / file).read_text(encoding="utf-8")
    for title, rows in tomllib.loads(text).items():
        table = tables[title] = {}
        under = rows.pop("under", "")
        for other in rows.pop("of", ()):
            table |= {stem: under + there for stem, there in tables[other].items()}
        for stem in rows.pop("without", ()):
            del table[stem]
        for stem, there in rows.items():
            form, words = (there, "") if isinstance(there, str) else there
            table |= {stem.replace("*", word): form.replace("*", word) for word in words.split(" ")}
    return tables


TABLES = read_tables("names.toml")
"""Tables of names.toml, {title: {stem in a file: module in transformers}}: of an architecture's layers, or of the
tensors outside of layers."""
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}  # fmt: skip
"""Stem of a fused tensor -> stems of the tensors whose rows it concatenates. llama.cpp's converter writes them with
`--fuse-qkv` and `--fuse-gate-up-exps`, and Ollama's first gpt-oss has the former."""
QWEN3_NEXT_FUSED = {**FUSED, "ssm_in": ("attn_qkv", "attn_gate"), "ssm_ba": ("ssm_beta", "ssm_alpha")}
PARAMETERS = ("sinks", "expert_bias", "e_score_correction_bias", "dt_bias", "A_log", "D")
"""Names of bare parameters: in transformers they have no suffix; files write ".weight", ".bias" or none."""
XIELU = {
    f"xielu.{name}": (f"mlp.act_fn.{name}", shape)
    for name, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items()
}
HEAD_LAYER = "mtp.layers.0."
"""transformers' prefix of the tensors of a multi-token prediction head, which GGUF files have as one more layer."""
