"""llama.cpp's architectures that can be read: for each, how to get config.json's fields and transformers' tensors back.

Sources: llama.cpp's conversion/*.py (once convert_hf_to_gguf.py) for the changes that its converters make,
src/models/*.cpp for defaults of missing values. Comments name the differences of Ollama's own converter.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.gguf import names
from asyncengine.execution.models.formats.gguf.header import MAX_STATES, Header, StateSizes
from asyncengine.execution.models.formats.gguf.names import TABLES, TensorName
from asyncengine.execution.models.refusals import MAX_LAYERS

Order = NDArray[np.int64]
Fields = Mapping[str, Any]


class Moved(NamedTuple):
    """Permutation of a tensor's rows and columns between a file and transformers.

    Row i of transformers' tensor is row `rows[i]` of the file's, which has `total` rows (0: as many as `rows`).
    Column i of the file's tensor is column `columns[i]` of transformers'.
    """

    rows: Order | None = None
    total: int = 0
    columns: Order | None = None


class Rope(NamedTuple):
    """Defaults of rotary embeddings for values that a header may leave out: `base`, linear `factor`, type of the
    `scaling`, further `rope_parameters` of YaRN; `local` is the base of layers with a window, if it is another."""

    base: float = 10000.0
    factor: float = 0.0
    scaling: str = ""
    yarn: Mapping[str, Any] = {}
    local: float | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: its model_type in transformers, and how a file's content maps to that model."""

    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: TABLES["LLAMA"])
    keys: str = ""
    """Fields of config.json that are read from the header, separated by spaces; FIELD=True, FIELD=False are fixed."""
    more: Callable[[Header], Mapping[str, Any]] | None = None
    """Function for further fields of config.json; "rope" among them is a `Rope` with other defaults than usual."""
    norm: str = "rms_norm_eps"
    """Field of the norms' epsilon; "" if the family has none, or `more` gives it."""
    attention: Literal["rotated", "unrotated", "latent", "none"] = "rotated"
    """"rotated" reads rotary embeddings and the size of a head, "unrotated" the latter, the others neither."""
    partial: bool = False
    """Whether the family can rotate a part of each head (`partial_rotary_factor`)."""
    norm_offset: float = 0.0
    """Number that the converter adds to the weights of norms."""
    moved: Callable[[Header, TensorName, int], Moved | None] | None = None
    """(header, name, rows) -> the permutation of a tensor with this number of rows; None: it is in order. Raises
    `ValueError` for a number of rows that is impossible."""
    state: str = ""
    """Fields of config.json for the `StateSizes`, in their order."""
    decay_shape: Sequence[int] = (-1,)
    """Shape of the states' decay in transformers."""
    join: Literal["turns", "below", "latent"] = "below"
    """The way to join two tensors of a file into one: "turns" interleaves their rows and transposes the result;
    "below" concatenates the rows of each expert; "latent" those of each head, the first of which a file transposes."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: names.FUSED)
    outer: Mapping[str, str] = field(default_factory=lambda: TABLES["OUTER"])
    """Names of tensors outside of layers, as in `layer`."""
    prefix: str = "model.layers.{}."
    head: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of the tensors of a multi-token prediction head that is read, as in `outer`."""
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Key of the header with a number for each layer -> (name, shape) of the tensors that it is in transformers."""


def halves(header: Header, name: TensorName, rows: int) -> Moved | None:
    """Order of queries and keys: a file rotates neighbouring dimensions together, transformers the halves of a head."""
    if name.stem not in ("attn_q", "attn_k"):
        return None
    heads = header["attention.head_count"]
    if name.stem == "attn_k":
        heads = header.get("attention.head_count_kv", heads)
    if not heads or rows % (2 * heads):
        raise ValueError(f"{rows} rows for {heads} heads")
    return Moved(np.arange(rows, dtype=np.int64).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows))


def windows(header: Header, period: int, default: int | None = None) -> dict[str, Any]:
    """`sliding_window` and `layer_types`: windows are in the layers of `attention.sliding_window_pattern`, else in all
    but the last of each `period`. A window of 0 means none. `default`: the window of a header without one."""
    key = "attention.sliding_window"
    window = header[key] if default is None else header.get(key, default)
    layers = min(header["block_count"], MAX_LAYERS)
    pattern = header.other("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(slides) for slides in pattern]
    else:
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            period = pattern
        windowed = [(index + 1) % period != 0 for index in range(layers)]
    layer_types = ["sliding_attention" if slides and window else "full_attention" for slides in windowed]
    return {"sliding_window": window or None, "layer_types": layer_types}


def _scale_of_scores(header: Header, *, by_width: bool) -> int:
    """`query_pre_attn_scalar`: the size of a head, in the largest models width over heads (`by_width`)."""
    width = header["embedding_length"] // (header["attention.head_count"] or 1)
    return int(width if by_width else header.get("attention.key_length", width))


def _gemma2(header: Header) -> Fields:
    return {
        "query_pre_attn_scalar": _scale_of_scores(header, by_width=header["block_count"] == 46),
        "attn_logit_softcapping": header.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.get("final_logit_softcapping", 30.0),
        **windows(header, 2, 4096),
    }


def _gemma3(header: Header) -> Fields:
    # Ollama's files leave out the norms' epsilon, the base of frequencies, and the scaling of 4B to 27B; they have a
    # cap for 1B (26 layers), which has none
    layers = header["block_count"]
    cap = 0.0 if layers == 26 else header.get("final_logit_softcapping", 0.0)
    local = header.get("rope.freq_base_swa", header.get("rope.local.freq_base", 10000.0))
    return {
        "query_pre_attn_scalar": _scale_of_scores(header, by_width=layers == 62),
        "final_logit_softcapping": cap or None,
        "rms_norm_eps": header.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope": Rope(header.get("rope.global.freq_base", 1e6), 8.0 if layers in (34, 48, 62) else 0.0, local=local),
        **windows(header, 6, 0),
    }


def _granite(header: Header) -> Fields:
    if not header.get("rope.scaling.finetuned", True):  # llama.cpp's switch for this family
        raise UnsupportedModel(f"{header.path}: granite without rotary embeddings is not read")
    return {}


def _olmo2(header: Header) -> Fields:
    if not header.get("attention.sliding_window", 0):
        return {}
    rope = Rope(local=header.get("rope.freq_base", 10000.0))
    return {"model_type": "olmo3", "rope": rope, **windows(header, 4)}


def _mistral3(header: Header) -> Fields:
    # the second of two names is Ollama's
    logarithm = header.get("rope.scaling.mscale_all_dim", 0.0)
    yarn = {
        "llama_4_scaling_beta": header.get("attention.temperature_scale", header.get("rope.scaling_beta", 0.0)),
        "mscale": 1.0,
        "mscale_all_dim": header.get("rope.scaling.yarn_log_multiplier", logarithm),
    }
    return {"sliding_window": None, "rope": Rope(yarn=yarn)}


def _gpt_oss(header: Header) -> Fields:
    width = header.get("expert_feed_forward_length", header.get("feed_forward_length", 0))
    rope = Rope(scaling="yarn" if header.get("rope.scaling.factor") else "", yarn={"truncate": False})
    return {"intermediate_size": width, "rope": rope, **windows(header, 2)}


_QWEN_PERIOD = 4
"""Layers of Qwen 3.5 from one with attention to the next, for headers without `full_attention_interval`."""


def _qwen(header: Header) -> Fields:
    recurrent = header.of_layers("attention.recurrent_layers")
    heads = header.of_layers("attention.head_count_kv")
    if not recurrent and 0 in heads:  # Ollama's converter says it so
        recurrent = [not marked for marked in heads]
    period = max(header.get("full_attention_interval", _QWEN_PERIOD), 1)
    marks = recurrent or [(index + 1) % period != 0 for index in range(min(header.layers, MAX_LAYERS))]
    return {"layer_types": ["linear_attention" if marked else "full_attention" for marked in marks]}


def _grouped_heads(state: StateSizes, size: int, before: int = 0) -> Order:
    """Order of `before` rows that stay in place, then of value heads of `size` rows each. llama.cpp interleaves the
    value heads over the key heads that they belong to; transformers keeps those of one key head together."""
    heads_per_group = state.heads // state.groups
    head = np.arange(state.heads, dtype=np.int64)
    positions = (head % heads_per_group) * state.groups + head // heads_per_group
    rows = (positions[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
    return np.concatenate([np.arange(before, dtype=np.int64), before + rows])


def _qwen35_moved(header: Header, name: TensorName, rows: int) -> Moved | None:
    state = header.state_sizes()
    if state.heads == state.groups:
        return None
    match name.stem:
        case "attn_qkv" | "ssm_conv1d":
            return Moved(_grouped_heads(state, state.head_dim, 2 * state.groups * state.size))
        case "attn_gate":
            return Moved(_grouped_heads(state, state.head_dim))
        case "ssm_alpha" | "ssm_beta" | "ssm_dt" | "ssm_a":
            return Moved(_grouped_heads(state, 1))
        case "ssm_out":
            return Moved(columns=np.argsort(_grouped_heads(state, state.head_dim)))
    return None


def _of_each_group(groups: int, sizes: Sequence[int], wanted: Sequence[int]) -> Moved:
    """Rows of the sections `wanted`, each with those of all groups. The file stores rows group by group, and within a
    group section by section, with `sizes` rows each."""
    begins = np.cumsum([0, *sizes])
    groups_at = np.arange(groups, dtype=np.int64)[:, None] * begins[-1]
    rows = [(groups_at + begins[section] + np.arange(sizes[section])).reshape(-1) for section in wanted]
    return Moved(np.concatenate(rows), int(groups * begins[-1]))


def _qwen3next_moved(header: Header, name: TensorName, rows: int) -> Moved | None:
    """Order of fused tensors that a file stores key head by key head: b and a, in older files also q, k, v and z."""
    state = header.state_sizes()
    each = state.heads // state.groups
    match name.stem:
        case "ssm_beta" | "ssm_alpha":
            return _of_each_group(state.groups, [each, each], [0 if name.stem == "ssm_beta" else 1])
        case "attn_qkv" | "attn_gate" if f"blk.{name.layer}.ssm_in.weight" in header.tensors:
            sizes = [state.size] * 2 + [each * state.head_dim] * 2
            return _of_each_group(state.groups, sizes, [0, 1, 2] if name.stem == "attn_qkv" else [3])
    return None


def _lfm(header: Header) -> Fields:
    gate = header.tensors.get("blk.0.ffn_gate.weight")
    return {
        "layer_types": ["full_attention" if each else "conv" for each in header.attending()],
        # there are files of Ollama's whose header has another width than the tensor
        "intermediate_size": header["feed_forward_length"] if gate is None else gate.shape[0],
    }


def _nemotron(header: Header) -> Fields:
    def layer_type(layer: int, heads: int) -> str:
        if heads:
            return "full_attention"
        if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors:
            return "moe"
        return "mlp" if f"blk.{layer}.ffn_up.weight" in header.tensors else "linear_attention"

    return {"layers_block_type": [layer_type(*each) for each in enumerate(header.attending())]}


def _kimi(header: Header) -> Fields:
    heads, dense = header.attending(), header.get("leading_dense_block_count", 0)
    count, dim = header["attention.head_count"], header["kda.head_dim"]
    shared = header["rope.dimension_count"]
    key, value = header["attention.key_length_mla"], header["attention.value_length_mla"]
    if key <= shared or not value or not dim or count * max(key, value, dim) > MAX_STATES:
        raise ModelNotFound(
            f"{header.path}: {header.architecture} has {count} heads with keys of {key}, values of {value} and "
            f"states of {dim} numbers, of which {shared} of a key are shared"
        )
    return {
        "mlp_layer_types": ["dense" if index < dense else "sparse" for index in range(len(heads))],
        "num_key_value_heads": count, "linear_num_heads": count, "linear_head_dim": dim,
        "qk_rope_head_dim": shared, "qk_nope_head_dim": key - shared, "v_head_dim": value,
    }  # fmt: skip


MORE: Mapping[str, Callable[[Header], Fields]] = {
    "gemma2": _gemma2, "gemma3": _gemma3, "granite": _granite, "olmo2": _olmo2, "mistral3": _mistral3,
    "gpt_oss": _gpt_oss, "qwen": _qwen, "lfm": _lfm, "nemotron": _nemotron, "kimi": _kimi,
    "cohere2": lambda header: windows(header, 4),
    "exaone4": lambda header: windows(header, 4, 4096 if header["block_count"] == 64 else 0),
}  # fmt: skip
MOVED = {"halves": halves, "qwen35": _qwen35_moved, "qwen3next": _qwen3next_moved}


_TABLES = tomllib.loads((resources.files(__package__) / "architectures.toml").read_text(encoding="utf-8"))
OTHER_FILES, VALUES, PRESENT = (_TABLES.pop(title) for title in ("other files", "values", "present"))
"""Messages for files that are no text generator; {field of config.json: (key of the header, default)}, where "none"
makes 0 or no value None, and no default makes the key required; {field: tensors of which a layer must have one}."""


def _read_rows() -> dict[str, Architecture]:
    known = {"layer": TABLES, "outer": TABLES, "head": TABLES, "more": MORE, "moved": MOVED, "fused": vars(names)}
    known["values"] = vars(names)
    rows: dict[str, Architecture] = {}
    for title, fields in _TABLES.items():
        row = rows[fields.pop("like")] if "like" in fields else Architecture(fields["model_type"])
        made = {key: known[key][value] if key in known else value for key, value in fields.items()}
        rows[title] = replace(row, **made)
    return rows


ARCHITECTURES = _read_rows()
"""Architectures by `general.architecture`."""
LLAMA_ROW, MIXTRAL_ROW = ARCHITECTURES["llama"], ARCHITECTURES.pop("llama of experts")
"""llama.cpp calls Mixtral "llama", too: a header with experts is Mixtral's."""
