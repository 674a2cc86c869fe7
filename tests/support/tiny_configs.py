"""Configurations of tiny models: one of every supported family, and one for every option that changes a forward.

They are data, in `tiny_configs.json`: a class of transformers with the fields that differ from `common`, or all fields
where the class names its sizes otherwise ("alone"); or the family that an option is "like", with the fields that it has
otherwise. Sizes are chosen so that mistakes show: a vocabulary of 160, windows of 24 that outputs cross, grouped
queries, and biases where the family has them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import transformers as hf
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

VOCAB = 160
WINDOW = 24
WHOLE = 64
"""A width that all compiled kernels take; the others' fits no panel, so that their linears are of several forms."""
HYBRID = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated).parameters else 1
"""Groups of Mamba-2's states: transformers 5.17 normalises all of them as one, which later releases mended."""
MakeConfig = Callable[[], Any]


def common(**changes: Any) -> dict[str, Any]:
    """The sizes that most families name alike, with `changes`."""
    return {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, **changes,
    }  # fmt: skip


def tiny(name: str, **changes: Any) -> MakeConfig:
    """A configuration of that class with the common sizes. transformers imports the class's module when it is made."""
    return lambda: getattr(hf, name)(**common(**deepcopy(changes)))


def changed(name: str, **fields: Any) -> MakeConfig:
    """The tiny model of that family with other options."""

    def make() -> Any:
        config = FAMILIES[name]()
        return type(config)(**{**config.to_dict(), **fields})

    return make


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


def maker_of(fields: Mapping[str, Any]) -> MakeConfig:
    """Make a function that makes the configuration that `fields` describe, as entries of `tiny_configs.json` do."""
    own = {name: value for name, value in fields.items() if name not in ("class", "like", "alone")}
    if "like" in fields:
        return changed(fields["like"], **own) if own else FAMILIES[fields["like"]]
    if "alone" in fields:
        return lambda: getattr(hf, fields["class"])(**deepcopy(own))
    return tiny(fields["class"], **own)


_KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_KNOWN["families"]["granite4"]["mamba_n_groups"] = _KNOWN["families"]["mamba2"]["n_groups"] = GROUPS
if not hasattr(hf.GptOssConfig(), "swiglu_limit"):  # transformers 5.17 has the bound by heart
    del _KNOWN["families"]["gpt-oss"]["swiglu_limit"]
if not hasattr(hf, "Lfm3Config"):  # transformers before 5.24
    del _KNOWN["families"]["lfm3"], _KNOWN["options"]["lfm3-plain"]
FAMILIES: dict[str, MakeConfig] = {name: maker_of(fields) for name, fields in _KNOWN["families"].items()}
OPTIONS: dict[str, MakeConfig] = {name: maker_of(fields) for name, fields in _KNOWN["options"].items()}
"""Options that change the forward: the families' own tiny models have some already. With longrope, transformers changes
the frequencies while a sequence grows, and leaves cached keys as they are; its forward over all tokens knows one set,
as the decoder does."""
WIDE: dict[str, MakeConfig] = {name: maker_of(fields) for name, fields in _KNOWN["wide"].items()}
"""Models with heads of 64 dimensions, the smallest that FlashInfer's kernels take; 1, 2, 7, 4, 2 and 2 query heads for
each of keys."""
