"""llama.cpp's architectures that are read, a row for each: what a file says, and what its converter did.

Sources: llama.cpp's conversion/*.py (once convert_hf_to_gguf.py) for what a converter does, src/models/*.cpp for what a
header leaves to the reader. Comments name what Ollama's own converter does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class Architecture:
    """One of llama.cpp's architectures: its model type in transformers, and how to come there from a file."""

    model_type: str
    layer: Mapping[str, str] = field(default_factory=lambda: TABLES["LLAMA"])
    keys: str = ""
    """Keys of config.json that tables of `config` read, and KEY=True or KEY=False for what is always so."""
    more: Callable[[Header], Mapping[str, Any]] | None = None
    """Further content of config.json, and "rope": the `Rope`, where it is not that of most."""
    norm: str = "rms_norm_eps"
    """Key of the norms' epsilon; "" where there is none, or `more` has it."""
    attention: Literal["rotated", "unrotated", "latent", "none"] = "rotated"
    """"rotated" reads rotary values and the length of a head, "unrotated" the latter, the others neither."""
    partial: bool = False
    """Heads may be rotated in part."""
    norm_offset: float = 0.0
    """Number that the converter adds to the weights of norms."""
    moved: Callable[[Header, TensorName, int], Moved | None] | None = None
    """Order of a tensor of so many rows. Raises `ValueError` for a number of rows that cannot be."""
    state: str = ""
    """Keys of config.json for the `StateSizes`, in their order."""
    decay_shape: tuple[int, ...] = (-1,)
    """Shape of the states' decay in transformers."""
    join: Literal["turns", "below", "latent"] = "below"
    """Joined tensors: rows of both parts in turns, and inputs before outputs; of each expert, the second part below the
    first; of each head, the second below the first, which is transposed in the file."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: names.FUSED)
    outer: Mapping[str, str] = field(default_factory=lambda: TABLES["OUTER"])
    """Tensors outside of layers, as `layer`."""
    prefix: str = "model.layers.{}."
    head: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tensors of the layer behind the last, as `outer`, where it predicts further tokens and is read."""
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Keys of the header with a number for each layer that is a tensor in transformers: (name, shape)."""


def halves(header: Header, name: TensorName, rows: int) -> Moved | None:
    """Queries and keys: neighbours rotate together in a file, the halves of a head do in transformers."""
    if name.stem not in ("attn_q", "attn_k"):
        return None
    heads = header["attention.head_count"]
    if name.stem == "attn_k":
        heads = header.get("attention.head_count_kv", heads)
    if not heads or rows % (2 * heads):
        raise ValueError(f"{rows} rows for {heads} heads")
    return Moved(np.arange(rows, dtype=np.int64).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows))


def windows(header: Header, period: int, default: int | None = None) -> dict[str, Any]:
    """The window, and which layers have it: those of `attention.sliding_window_pattern`, else all but the last of
    each `period`. A window of 0 is none. `default` is the window that a header may leave out."""
    key = "attention.sliding_window"
    window = header[key] if default is None else header.get(key, default)
    layers = min(header["block_count"], MAX_LAYERS)
    pattern = header.other("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == layers:
        windowed = [bool(each) for each in pattern]
    else:
        if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
            period = pattern
        windowed = [(index + 1) % period != 0 for index in range(layers)]
    kinds = ["sliding_attention" if each and window else "full_attention" for each in windowed]
    return {"sliding_window": window or None, "layer_types": kinds}


def _scale_of_scores(header: Header, *, by_width: bool) -> int:
    """The number whose root scores are divided by: the length of a head, in the largest models width over heads."""
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
    rope = Rope(kind="yarn" if header.get("rope.scaling.factor") else "", yarn={"truncate": False})
    return {"intermediate_size": width, "rope": rope, **windows(header, 2)}


_QWEN_PERIOD = 4
"""Layers of Qwen 3.5 from one with attention to the next, where a header does not say it."""


def _qwen(header: Header) -> Fields:
    recurrent = header.of_layers("attention.recurrent_layers")
    heads = header.of_layers("attention.head_count_kv")
    if not recurrent and 0 in heads:  # Ollama's converter says it so
        recurrent = [not each for each in heads]
    period = max(header.get("full_attention_interval", _QWEN_PERIOD), 1)
    marks = recurrent or [(index + 1) % period != 0 for index in range(min(header.layers, MAX_LAYERS))]
    return {"layer_types": ["linear_attention" if each else "full_attention" for each in marks]}


def _grouped_heads(state: StateSizes, size: int, before: int = 0) -> Order:
    """llama.cpp has heads of values in turns of the heads of keys that they belong to, transformers has those of one
    head of keys beside each other: the order of `before` rows that stay, and `size` rows of each head."""
    each = state.heads // state.groups
    head = np.arange(state.heads, dtype=np.int64)
    places = (head % each) * state.groups + head // each
    moved = (places[:, None] * size + np.arange(size, dtype=np.int64)).reshape(-1)
    return np.concatenate([np.arange(before, dtype=np.int64), before + moved])


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
    """Rows go group by group, in each part by part of so many rows (`sizes`): those of the parts `wanted`, of each the
    rows of all groups."""
    begins = np.cumsum([0, *sizes])
    groups_at = np.arange(groups, dtype=np.int64)[:, None] * begins[-1]
    parts = [(groups_at + begins[part] + np.arange(sizes[part])).reshape(-1) for part in wanted]
    return Moved(np.concatenate(parts), int(groups * begins[-1]))


def _qwen3next_moved(header: Header, name: TensorName, rows: int) -> Moved | None:
    """The order of tensors that go key head by key head in a file: b and a, in older files all the others as well."""
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
    def kind(layer: int, heads: int) -> str:
        if heads:
            return "full_attention"
        if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors:
            return "moe"
        return "mlp" if f"blk.{layer}.ffn_up.weight" in header.tensors else "linear_attention"

    return {"layers_block_type": [kind(*each) for each in enumerate(header.attending())]}


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


_BIASES = "attention_bias mlp_bias"
_EXPERTS = "num_experts num_experts_per_tok moe_intermediate_size"
_SCALES = "attention_multiplier embedding_multiplier residual_multiplier logits_scaling"
_GROUPED_EXPERTS = "num_experts_per_tok moe_intermediate_size routed_scaling_factor n_group topk_group"
_QWEN_KEYS = "linear_conv_kernel_dim attention_bias"
_MAMBA_KEYS = "mamba_d_conv mamba_conv_bias mamba_proj_bias attention_bias"
_NEMOTRON_KEYS = "conv_kernel use_bias use_conv_bias mlp_bias"
_NEMOTRON_EXPERTS = "n_routed_experts moe_shared_expert_intermediate_size moe_latent_size norm_topk_prob"
_GRANITE_KEYS = (
    "layer_types mamba_expand num_local_experts num_experts_per_tok shared_intermediate_size position_embedding_type"
)
_KIMI_KEYS = "layer_types linear_conv_kernel_dim kv_lora_rank num_local_experts n_shared_experts norm_topk_prob=True"
_QWEN_SIZES = "linear_num_value_heads linear_value_head_dim linear_key_head_dim linear_num_key_heads"
_MAMBA_SIZES = "mamba_n_heads mamba_d_head mamba_d_state mamba_n_groups"
_NEMOTRON_SIZES = "mamba_num_heads mamba_head_dim ssm_state_size n_groups"

_QWEN2_ROW = Architecture("qwen2")
_QWEN3_ROW = Architecture("qwen3", TABLES["HEAD_NORMS"], "attention_bias")
_GPT_OSS_ROW = Architecture(
    "gpt_oss", TABLES["GPT_OSS"], "num_local_experts num_experts_per_tok attention_bias", _gpt_oss,
    join="turns",
)  # fmt: skip
LLAMA_ROW = Architecture("llama", keys=_BIASES, moved=halves)
MIXTRAL_ROW = Architecture("mixtral", TABLES["MIXTRAL"], "num_local_experts num_experts_per_tok", moved=halves)
"""llama.cpp's name for Mixtral is llama, too: a header with experts is."""
_QWEN35_MOE_ROW = Architecture(
    "qwen3_5_moe_text", TABLES["QWEN35_MOE"], f"{_QWEN_KEYS} {_EXPERTS} shared_expert_intermediate_size", _qwen,
    partial=True, norm_offset=1.0, moved=_qwen35_moved, state=_QWEN_SIZES, head=TABLES["QWEN_HEAD"],
)  # fmt: skip
_NEMOTRON_ROW = Architecture(
    "nemotron_h", TABLES["NEMOTRON"], _NEMOTRON_KEYS, _nemotron, "layer_norm_epsilon", "unrotated", moved=halves,
    outer=TABLES["BACKBONE"], prefix="backbone.layers.{}.", state=_NEMOTRON_SIZES,
)  # fmt: skip

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA_ROW,
    "mistral3": Architecture("ministral3", more=_mistral3, moved=halves),
    "smollm3": Architecture("smollm3", keys=_BIASES, moved=halves),
    "qwen2": _QWEN2_ROW,
    "qwen3": _QWEN3_ROW,
    # of models with images, all three parts of a text's position are alike, and rotate as one
    "qwen2vl": _QWEN2_ROW,
    "qwen25vl": _QWEN2_ROW,
    "qwen3vl": _QWEN3_ROW,
    "qwen2moe": Architecture(
        "qwen2_moe", TABLES["QWEN_MOE"], f"{_EXPERTS} shared_expert_intermediate_size norm_topk_prob=False",
    ),
    "qwen3moe": Architecture("qwen3_moe", TABLES["QWEN_MOE"], f"{_EXPERTS} attention_bias norm_topk_prob=True"),
    "gpt-oss": _GPT_OSS_ROW,
    "gptoss": replace(_GPT_OSS_ROW, layer=TABLES["OLLAMA_GPT_OSS"]),
    "gemma": Architecture("gemma", keys="attention_bias", norm_offset=1.0),
    "gemma2": Architecture("gemma2", TABLES["SANDWICH"], more=_gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", TABLES["SANDWICH"], more=_gemma3, norm="", norm_offset=1.0),
    "phi3": Architecture(
        "phi3", TABLES["PHI"],
        "sliding_window original_max_position_embeddings", partial=True,
    ),
    "apertus": Architecture("apertus", TABLES["APERTUS"], "attention_bias", values=names.XIELU),
    "glm4": Architecture("glm4", TABLES["GLM"], "attention_bias", partial=True),
    "granite": Architecture("granite", keys=f"{_BIASES} {_SCALES}", more=_granite, moved=halves),
    "olmo": Architecture("olmo", keys="clip_qkv attention_bias=False", norm="", moved=halves),
    "olmo2": Architecture("olmo2", TABLES["NORMS_AFTER"], "attention_bias", _olmo2),
    "exaone4": Architecture(
        "exaone4", TABLES["NORMS_AFTER"],
        more=lambda header: windows(header, 4, 4096 if header["block_count"] == 64 else 0),
    ),
    "command-r": Architecture(
        "cohere", TABLES["HEAD_NORMS"], "logit_scale use_qk_norm attention_bias", norm="layer_norm_eps",
    ),
    "cohere2": Architecture(
        "cohere2", TABLES["LLAMA"], "logit_scale attention_bias", lambda header: windows(header, 4), "layer_norm_eps",
    ),
    "starcoder2": Architecture("starcoder2", TABLES["STARCODER"], "use_bias sliding_window", norm="norm_epsilon"),
    "stablelm": Architecture(
        "stablelm", TABLES["STABLELM"], "use_qkv_bias use_parallel_residual qk_layernorm", norm="layer_norm_eps",
        partial=True,
    ),
    "nemotron": Architecture("nemotron", keys=_BIASES, norm="norm_eps", partial=True, norm_offset=1.0),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", TABLES["HUNYUAN"], "attention_bias"),
    "seed_oss": Architecture("seed_oss", TABLES["SEED"], f"{_BIASES} attention_out_bias"),
    "qwen35": Architecture(
        "qwen3_5_text", TABLES["QWEN"], _QWEN_KEYS, _qwen, partial=True, norm_offset=1.0, moved=_qwen35_moved,
        state=_QWEN_SIZES, head=TABLES["QWEN_HEAD"],
    ),
    "qwen35moe": _QWEN35_MOE_ROW,
    # but for the order of rows in transformers' checkpoints, Qwen3-Next is Qwen 3.5
    "qwen3next": replace(_QWEN35_MOE_ROW, moved=_qwen3next_moved, fused=names.QWEN3_NEXT_FUSED),
    "lfm2": Architecture(
        "lfm2", TABLES["LFM"], "conv_L_cache conv_bias block_auto_adjust_ff_dim=False", _lfm, "norm_eps",
        outer=TABLES["LFM_OUTER"],
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", TABLES["LFM_MOE"],
        f"conv_L_cache conv_bias {_EXPERTS} num_dense_layers use_expert_bias routed_scaling_factor norm_topk_prob=True",
        _lfm, "norm_eps", outer=TABLES["LFM_OUTER"],
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid", TABLES["GRANITE"], f"{_MAMBA_KEYS} {_SCALES} {_GRANITE_KEYS}", moved=halves,
        state=_MAMBA_SIZES,
    ),
    # Falcon-H1's converter multiplies the tensors by all of the family's factors
    "falcon-h1": Architecture(
        "falcon_h1", TABLES["FALCON"],
        f"{_MAMBA_KEYS} mlp_bias projectors_bias mamba_d_ssm mamba_rms_norm mamba_norm_before_gate=False",
        outer=TABLES["FALCON_OUTER"], state=_MAMBA_SIZES,
    ),
    "mamba2": Architecture(
        "mamba2", TABLES["MAMBA2"], "conv_kernel use_bias use_conv_bias expand", norm="layer_norm_epsilon",
        attention="none", outer=TABLES["BACKBONE"], prefix="backbone.layers.{}.",
        state="num_heads head_dim state_size n_groups",
    ),
    "nemotron_h": _NEMOTRON_ROW,
    "nemotron_h_moe": replace(_NEMOTRON_ROW, keys=f"{_NEMOTRON_KEYS} {_GROUPED_EXPERTS} {_NEMOTRON_EXPERTS}"),
    "kimi-linear": Architecture(
        "kimi_linear", TABLES["KIMI"], f"{_GROUPED_EXPERTS} {_KIMI_KEYS}", _kimi, attention="latent",
        decay_shape=(1, 1, -1, 1), join="latent",
    ),
}  # fmt: skip
"""Rows by `general.architecture`."""

OTHER_KINDS: Mapping[str, str] = {
    "clip": "is the image part of a model (mmproj); pass the file of its language model, and this one as mmproj",
    "mmproj": "is the image part of a model (mmproj); pass the file of its language model, and this one as mmproj",
    "adapter": "is a LoRA adapter in GGUF; adapters are read in PEFT's format (adapters={'NAME': PATH})",
    "imatrix": "is an importance matrix, made while quantizing, and no model",
    "controlvector": "is a control vector and no model",
    "bert": "is an embedding model: it gives vectors and writes no text",
    "nomic-bert": "is an embedding model: it gives vectors and writes no text",
    "whisper": "is a speech recognizer: it reads sound",
}
"""Files that are no text generator, by `general.type` or `general.architecture`."""
