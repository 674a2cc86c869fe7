"""Names of tensors: in a file, and in transformers' checkpoints."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple


class TensorName(NamedTuple):
    """A tensor's name in a file: "blk.LAYER.STEM.SUFFIX"; the layer is None outside of layers, the suffix may be ""."""

    layer: int | None
    stem: str
    suffix: str

    def __str__(self) -> str:
        before = "" if self.layer is None else f"blk.{self.layer}."
        return f"{before}{self.stem}{self.suffix and '.'}{self.suffix}"


NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,4})\.)?(?!blk\.)(.+?)(?:\.(weight|bias))?", re.DOTALL)
"""Names that converters give: layer, stem and suffix."""


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
"""Stem in a file -> name of the module in transformers, of the tensors of each architecture's layers, and outside of
them (names.toml)."""
FUSED: Mapping[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}  # fmt: skip
"""Stems that stand for several, one below the other: llama.cpp's converter makes them if it is told so
(`--fuse-qkv`, `--fuse-gate-up-exps`), and Ollama's first gpt-oss has the former."""
QWEN3_NEXT_FUSED = {**FUSED, "ssm_in": ("attn_qkv", "attn_gate"), "ssm_ba": ("ssm_beta", "ssm_alpha")}
PARAMETERS = ("sinks", "expert_bias", "e_score_correction_bias", "dt_bias", "A_log", "D")
"""Parameters that a module has itself: transformers adds no suffix; files have ".weight", ".bias" or none."""
XIELU = {
    f"xielu.{name}": (f"mlp.act_fn.{name}", shape)
    for name, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items()
}
HEAD_LAYER = "mtp.layers.0."
"""The beginning of transformers' names of other tensors of the layer behind the last."""
