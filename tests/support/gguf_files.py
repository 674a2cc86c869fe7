"""GGUF files of tiny models, written by the public `gguf` package, as llama.cpp's converter does.

Names come from that package's own table, so that what reads them is held against somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support import kquants
from support.gguf_states import STATES, Moved, add_fields, halved, moved_state, only, paired, state_header
from transformers import AutoModelForCausalLM

PLAIN = ("F32", "F16", "BF16")
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "MXFP4": (),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
}  # fmt: skip
"""Byte offsets of float16 scales in a block of each type."""
QUANTIZED = tuple(_HALVES)
_LARGEST = {
    "Q4_0": 8, "Q4_1": 16, "Q5_0": 16, "Q5_1": 32, "Q8_0": 128, "IQ4_NL": 127, "Q2_K": 45, "Q3_K": 128, "Q4_K": 945,
    "Q5_K": 1953, "Q6_K": 4096, "IQ4_XS": 4064,
}  # fmt: skip
"""The largest number of each type, in steps of its scale."""

ARCHITECTURES = {
    "llama": "llama", "ministral3": "mistral3", "mistral": "llama", "mixtral": "llama", "smollm3": "smollm3",
    "qwen2": "qwen2", "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi3": "phi3", "glm4": "glm4", "granite": "granite", "olmo": "olmo", "olmo2": "olmo2",
    "olmo3": "olmo2", "exaone4": "exaone4", "cohere": "command-r", "cohere2": "cohere2", "starcoder2": "starcoder2",
    "apertus": "apertus", "stablelm": "stablelm", "nemotron": "nemotron", "hunyuan_v1_dense": "hunyuan-dense",
    "seed_oss": "seed_oss", **STATES,
}  # fmt: skip
"""model_type -> llama.cpp's name."""
_PAIRED = ("llama", "mistral3", "smollm3", "granite", "olmo")
_ADDED = ("gemma", "gemma2", "gemma3", "nemotron")
_STACKS = (".experts.", ".norms.")
_PLAIN_NAMES = ("norm", ".bias", "conv1d", "conv.conv", "ssm_a", "ssm_d")
"""Parts of names of tensors that stay float32."""


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, size: float = 0.1) -> np.ndarray:
    """uint8 [rows, bytes]: any numbers, with scales of both signs that keep weights at about `size`."""
    numbers, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, columns // numbers, nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = generator.integers(118, 124, blocks.shape[:2])
    for first in _HALVES[kind]:
        scale = generator.normal(size=(*blocks.shape[:2], 1)) * size / _LARGEST[kind]
        blocks[:, :, first : first + 2] = scale.astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantized(blocks: np.ndarray, kind: str) -> torch.Tensor:
    """Numbers that the blocks stand for by the public package."""
    return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))


Kinds = Callable[[str, torch.Tensor], str]


def checkpoint_of(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model under the names that files have, whatever its module calls them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def model_of(folder: Path, weights: dict[str, torch.Tensor]) -> Any:
    """The model of `checkpoint_of` with other weights."""
    whole = load_file(folder / "model.safetensors") | {name: each.contiguous() for name, each in weights.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def write_gguf(
    path: Path, config: Any, weights: dict[str, torch.Tensor], kind_of: Kinds = lambda name, tensor: "F32",
    more: Mapping[str, Any] | None = None, *, split: int = 0, without: Sequence[str] = (), beside: Sequence[str] = (),
    architecture: str = "", change: Callable[[Any], object] = lambda writer: None, legacy: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """A model of transformers' configuration and checkpoint; the tensors that were really written, under its names.

    `kind_of`: the type of a matrix, by its name here and content. Types that the package cannot write get random
    numbers. `more`: further values. `split`: most tensors of a file, 0: one file.
    `without`: values that are left out; `beside`: names of further tensors. `architecture`: llama.cpp's name, if not
    the usual one. `change`: told of the writer before it writes. `legacy`: Qwen3-Next's projections in one tensor.
    """
    architecture = architecture or ARCHITECTURES[config.model_type]
    if architecture == "nemotron_h" and "moe" in config.layers_block_type:
        architecture = "nemotron_h_moe"
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_type("model")
    _hyperparameters(writer, architecture, config)
    for key, value in (more or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, list: writer.add_array, float: writer.add_float32}.get(
            type(value), writer.add_uint32
        )
        add(key, value)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _stacked(weights).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".act_fn." in name:
            found[name] = tensor
            continue
        state = config.model_type in STATES
        parts, back = (moved_state if state else _moved)(config, name, tensor.float(), legacy)
        meant = []
        for part, moved in parts:
            there = _name(table, part)
            plain = moved.ndim == 1 or any(word in there for word in _PLAIN_NAMES)
            kind = "F32" if plain else kind_of(there, moved)
            stored, values = _stored(moved.contiguous().numpy(), kind)
            writer.add_tensor(there, stored, raw_dtype=gguf.GGMLQuantizationType[kind])
            meant.append(values)
        whole = back(meant)
        before, stack, after = next((name.partition(part) for part in _STACKS if part in name), (name, "", ""))
        if not stack or name in weights:
            found[name] = whole
        else:
            found |= {f"{before}{stack}{index}.{after}": each for index, each in enumerate(whole)}
    for name, vector in _rope_tensors(config).items():
        writer.add_tensor(name, vector)
    for kind in ("alpha_p", "alpha_n", "beta", "eps"):
        values = [float(tensor) for name, tensor in found.items() if name.endswith(f".act_fn.{kind}")]
        if values:
            writer.add_array(f"xielu.{kind}", values)
    for key in without:
        del writer.kv_data[0][key]
    for name in beside:
        writer.add_tensor(name, np.zeros((2, 3), dtype=np.float32))
    change(writer)
    finish(writer)
    return found


def finish(writer: Any) -> None:
    """Write all that was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stacked(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with one tensor for all experts, and for the norms of all heads, as the converter has them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        before, stack, after = next((name.partition(part) for part in _STACKS if part in name), (name, "", ""))
        number, _, own = after.partition(".")
        if not number.isdecimal():
            found[name] = tensor
            continue
        count = sum(key.startswith(before + stack) and key.endswith(f".{own}") for key in weights)
        found[f"{before}{stack}{own}"] = torch.stack(
            [weights[f"{before}{stack}{index}.{own}"] for index in range(count)]
        )
    return found


def _name(table: Any, name: str) -> str:
    """The name by gguf's own table, which has some of the names without ".weight", and some not at all."""
    if name.startswith("blk."):
        return name
    given = name.replace("dt_bias", "dt_proj.bias").replace("e_score_correction_bias", "e_score_correction.bias")
    given = given.replace(".norms.", ".").replace("sinks", "sinks.weight")
    given = given.replace("expert_bias", "expert_bias.bias")
    given = given.removeprefix("model.") if ".feed_forward.experts." in given else given
    bare = name.endswith(("A_log", ".D"))
    found = table.get_name(given) if bare else table.get_name(given, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _moved(config: Any, name: str, tensor: torch.Tensor, legacy: bool) -> Moved:
    """A tensor of a model without states."""
    architecture = ARCHITECTURES[config.model_type]
    stem, _, last = name.rpartition(".")
    if stem.endswith(".experts"):  # gpt-oss': inputs first, and gate and up take turns
        suffix = "bias" if last.endswith("_bias") else "weight"
        turned = (lambda each: each) if suffix == "bias" else (lambda each: each.transpose(1, 2))
        if last.startswith("down"):
            return [(f"{stem}.down_proj.{suffix}", turned(tensor))], lambda found: turned(found[0])
        gate, up = turned(tensor)[:, ::2], turned(tensor)[:, 1::2]
        return [(f"{stem}.gate_proj.{suffix}", gate), (f"{stem}.up_proj.{suffix}", up)], lambda found: turned(
            torch.stack(found, dim=2).flatten(1, 2)
        )
    if name.endswith("shared_expert_gate.weight"):  # the converter writes rows of one as vectors
        return [(name, tensor.squeeze(0))], lambda found: found[0].unsqueeze(0)
    if architecture in _PAIRED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        return [(name, paired(tensor, heads))], lambda found: halved(found[0], heads)
    if architecture in _ADDED and name.endswith("norm.weight"):
        return [(name, tensor + 1)], lambda found: found[0] - 1
    return [(name, tensor)], only


def _stored(values: np.ndarray, kind: str) -> tuple[np.ndarray, torch.Tensor]:
    """Bytes of a type, and what they stand for."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        stored = kquants.quantize(values, kind)
    except NotImplementedError:
        flat = random_blocks(kind, values.size // values.shape[-1], values.shape[-1], seed=values.size)
        stored = flat.reshape(*values.shape[:-1], -1)
    return stored, torch.from_numpy(np.array(gguf.dequantize(stored, number)))


def _hyperparameters(writer: Any, architecture: str, config: Any) -> None:
    """Write what the converter says of a family."""
    if config.model_type in STATES:
        state_header(writer, config)
        return
    add_fields(writer, config, "all")
    add_fields(writer, config, architecture)
    _rope(writer, architecture, config)
    get = lambda name: getattr(config, name, None)  # noqa: E731
    if get("sliding_window") and architecture != "llama":
        writer.add_sliding_window(config.sliding_window)
        if architecture in ("olmo2", "exaone4"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    elif architecture == "phi3":
        writer.add_sliding_window(0)
    experts = get("num_experts") or get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(get("moe_intermediate_size") or config.intermediate_size)


def _rope(writer: Any, architecture: str, config: Any) -> None:
    every = config.rope_parameters
    if every is None:
        return
    rope = every.get("full_attention", every)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in every and architecture == "gemma3":
        writer.add_rope_freq_base_swa(every["sliding_attention"]["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", 1.0) if architecture in ("phi3", "glm4", "stablelm", "nemotron") else 1.0
    writer.add_rope_dimension_count(int(head_dim * share))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        add_fields(writer, rope, "yarn")
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)


def _rope_tensors(config: Any) -> dict[str, np.ndarray]:
    every = getattr(config, "rope_parameters", None) or {}
    rope = every.get("full_attention", every)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], dtype=np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = 2 * len(scaled)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}
