"""docs/models.md: every family that transformers has as a text generator, what serves it here, and the encoders.

    python -m tools.models_page                  all rows, in some minutes: what has no file here is tried
    python -m tools.models_page --only phi,mpt   these again, the others as they are written
    python -m tools.models_page --own            those with a file here again, in seconds

A family is asked by its configuration as it is when nothing is set. One without a file is tried: a tiny random model of
it is saved and loaded, and refused or not.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncengine.config import EngineConfig
from asyncengine.errors import EngineError, UnsupportedModel
from asyncengine.execution.models.checkpoint import Checkpoint
from asyncengine.execution.models.description import check_config
from asyncengine.execution.models.families import MULTIMODAL, NATIVE, decoder_config_of
from asyncengine.execution.models.families.encoders import ENCODERS
from asyncengine.execution.models.families.encoders import REFUSED as REFUSED_ENCODERS
from asyncengine.execution.models.formats import first_line
from asyncengine.execution.models.loading import load_model

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
OWN, TRANSFORMERS, REFUSED, UNTRIED = "own forward", "transformers", "refused", "untried"
_LENGTH = 2048
_SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "inner_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_head_dim"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "decoder_ffn_dim", "d_inner", "n_inner"), 64),
    "head_dim": 16, "qk_rope_head_dim": 16, "vocab_size": 160, "n_group": 1, "topk_group": 1, "rotary_dim": 8,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "first_k_dense_replace": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "image_size": 16, "patch_size": 4, "n_shared_experts": 1,
}  # fmt: skip
"""Fields of configurations and what a tiny model has in them."""
CHANGES: Sequence[Mapping[str, Any]] = (
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": 32, "qk_head_dim": 32},
    {"head_dim": None, "num_kv_heads": None, "num_key_value_heads": None},
    {"num_key_value_heads": 4, "qk_head_dim": 32},  # latent attention, half of it turned by position
    {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
    },  # layers that attend over the keys of another
)
"""Sizes that are tried in turn beside it, where a class takes no such sizes; None: the field is left as it is."""
_MOST = 50_000_000
"""Weights of a model that is tried."""


class Row(NamedTuple):
    """A family, and what serves it."""

    family: str
    served: str
    note: str

    def __str__(self) -> str:
        return f"| `{self.family}` | {self.served} | {self.note} |"


def families() -> list[str]:
    """All that transformers has as text generators, and the others that have a file here, or whose text has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *NATIVE, *MULTIMODAL})


def own_row(family: str) -> Row | None:
    """Row of a family with a file here; None: it has none, or none for the configuration of transformers' defaults."""
    from transformers import AutoConfig

    if family not in NATIVE and family not in MULTIMODAL:
        return None
    config = AutoConfig.for_model(family)
    described = decoder_config_of(config, _LENGTH)
    if described is None:
        return None
    try:
        check_config(config, Checkpoint(Path(), {}, (), {}), described)
    except UnsupportedModel as error:
        return Row(family, REFUSED, _reason(family, error))
    file = f"`families/{NATIVE[config.get_text_config().model_type]}`"
    return Row(family, OWN, f"its text, by the family in `text_config`: {file}" if family in MULTIMODAL else file)


def tried_row(family: str) -> Row:
    """Row of a family without: what comes of a tiny random model, or, where none can be made, of its configuration."""
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(family)
    except Exception:  # a class whose own defaults do not fit together
        return Row(family, UNTRIED, "loading one tells")
    try:
        check_config(default, Checkpoint(Path(), {}, (), {}), None)
        for change in CHANGES:
            with tempfile.TemporaryDirectory() as folder:
                if save_tiny(family, Path(folder), change):
                    load_model(folder, EngineConfig(device="cpu", show_progress=False))
                    return Row(family, TRANSFORMERS, "")
    except EngineError as error:
        return Row(family, REFUSED, _reason(family, error))
    return Row(family, UNTRIED, "loading one tells")


def save_tiny(family: str, folder: Path, change: Mapping[str, Any]) -> bool:
    """Write a tiny random checkpoint. False: this family's classes take none of such sizes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        default = AutoConfig.for_model(family)
        config = type(default)(**_shrunk(default, change))
        with torch.device("meta"):
            if sum(part.numel() for part in AutoModelForCausalLM.from_config(config).parameters()) > _MOST:
                return False
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        model(torch.arange(1, 9)[None], use_cache=False)
        model.save_pretrained(folder)
    except Exception:  # each class refuses sizes in its own way
        return False
    return True


def _shrunk(config: Any, change: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a tiny model of this class."""
    from transformers import PreTrainedConfig

    small = {name: value for name, value in {**_SMALL, **change}.items() if value is not None}
    fields = {name: value for name, value in small.items() if hasattr(config, name)}
    for name in getattr(config, "sub_configs", {}) or {}:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            fields[name] = _shrunk(part, change) | {"model_type": part.model_type}
    return fields


def _reason(family: str, error: EngineError) -> str:
    """An error's words without what the row says already."""
    said = first_line(error).removeprefix(f"family {family!r} ")
    return said.replace("|", "\\|").split(" (tmp")[0]


def page(rows: Sequence[Row], release: str) -> str:
    """The whole file. `release`: that of transformers of which every family was asked."""
    counts = {served: sum(row.served == served for row in rows) for served in (OWN, TRANSFORMERS, REFUSED, UNTRIED)}
    return f"""# Which models run

Every family (`model_type` in config.json) that transformers {release} has as a text generator, and
what serves it. Written by `python -m tools.models_page`, which asks the code; `tests/tools/test_models_page.py` fails
when this page does not say what the code does. Not to be edited by hand.

- **{OWN}** ({counts[OWN]}): a table in `asyncengine/execution/models/families/`; packed weights, compiled attention,
  int8 and int4, quantized checkpoints. Options that it does not know run through transformers.
- **{TRANSFORMERS}** ({counts[TRANSFORMERS]}): transformers' own modules with the engine's attention, slower. A tiny
  random model of the family was loaded and answered as transformers does.
- **{REFUSED}** ({counts[REFUSED]}): with the reason that loading one gives. Of a family whose layers may be of several
  kinds, what its configuration says when nothing is set.
- **{UNTRIED}** ({counts[UNTRIED]}): no tiny model of the family came of the sizes that others take.

Of models that read images or sounds as well, the text is served, and [pictures](howto/images.md) of those families that
that page names; all else is refused by name. [Adding a family](howto/add_a_model.md).

Where every layer has a sliding window or a chunk (Mistral 0.1, Phi-3, Starcoder 2), a running request gives back the
pages that nobody will see any more, and `engine.info.window` says how far it sees. Where only some have one (Gemma,
gpt-oss, Llama 4), these have pages of their own that are given back alike: [windows](howto/windows.md). Pages of
DeepSeek V2 and V3 and of others with latent attention hold one vector a token: [latent pages](howto/latent_pages.md).

| family | served by | |
|---|---|---|
{chr(10).join(map(str, rows))}

{encoders()}"""


def encoders() -> str:
    """The part about models whose tokens see those after them."""
    refused: dict[str, list[str]] = {}
    for family, why in REFUSED_ENCODERS.items():
        refused.setdefault(why, []).append(family)
    reasons = [f"- {', '.join(f'`{name}`' for name in names)}: {why}" for why, names in refused.items()]
    return f"""## Encoders

For vectors, reranking and classification, with the head of a `...ForSequenceClassification` where the checkpoint has
one: whole texts in both directions, without padding; float32, bfloat16, int8 and int4 on a CPU, with the same bits for
a text alone and among others. `gemma3_text` is EmbeddingGemma, with `use_bidirectional_attention`.

{", ".join(f"`{family}`" for family in ENCODERS)}.

Refused, each by name:

{chr(10).join(reasons)}
"""


def read_page() -> dict[str, Row]:
    """The rows as they are written, by family."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            family, served, note = line.removeprefix("| `").removesuffix(" |").replace("` | ", " | ", 1).split(" | ", 2)
            found[family] = Row(family, served, note)
    return found


def read_release() -> str:
    """The release of transformers that the page names."""
    found = re.search(r"that transformers (\S+) has", PAGE.read_text(encoding="utf-8"))
    assert found is not None, f"{PAGE} names no release of transformers"
    return found[1]


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, separated by commas")
    parser.add_argument("--own", action="store_true", help="only those with a file here")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    chosen = arguments.only.split(",") if arguments.only else families()
    release, rows = transformers.__version__, dict[str, Row]()
    if arguments.only or arguments.own:  # the others stay as they are written, of that release
        release, rows = read_release(), read_page()
    for family in chosen:
        row = own_row(family)
        if row is None and not arguments.own:
            row = tried_row(family)
        if row is not None:
            rows[family] = row
    PAGE.write_text(page([rows[name] for name in sorted(rows)], release), encoding="utf-8")


if __name__ == "__main__":
    main()
