"""The same weights as a GGUF file, for llama.cpp; run in the Python that has the package `gguf`.

    python -m benchmarks.peers.gguf_file CHECKPOINT FILE

Reads the raw numbers of one safetensors file, so it needs neither torch nor a tokenizer: llama.cpp wants a vocabulary,
and gets one whose tokens are numbers. Matrices keep the checkpoint's type, norms become float32, as llama.cpp wants
them. Names and the order of rotary dimensions are those of llama.cpp's own converter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers import gguf_mixed

TYPES = {"BF16": "uint16", "F32": "float32"}
LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write(source, config, target)


def tensors(source: Path) -> Iterator[tuple[str, str, Any]]:
    """Name, type ("BF16", "F32") and numbers of each tensor; bfloat16 as the 16 bits."""
    import numpy

    path = source / "model.safetensors"
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        kind = TYPES[entry["dtype"]]
        flat = numpy.memmap(path, dtype="uint8", mode="r", offset=8 + size + begin, shape=(end - begin,))
        yield name, entry["dtype"], flat.view(kind).reshape(entry["shape"])


def gguf_name(name: str) -> str:
    """ "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER[rest.removesuffix('.weight')]}.weight"


def interleave(matrix: Any, heads: int) -> Any:
    """Rows of a rotary projection in llama.cpp's order for Llama: pairs beside each other, not half a head apart."""
    rows, width = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(source: Path, config: dict[str, Any], target: Path) -> None:
    import gguf
    import numpy

    family = config["model_type"]
    mixed = gguf_mixed.FAMILIES.get(family)
    writer = gguf.GGUFWriter(target, family if mixed is None else mixed.architecture)
    if mixed is None:
        _write_settings(writer, config, family)
    else:
        mixed.settings(writer, config)
    _write_vocabulary(writer, int(config["vocab_size"]))
    found = _dense(source, config) if mixed is None else gguf_mixed.entries(config, tensors(source))
    for name, numbers in found:
        if numbers.dtype == numpy.uint16:
            raw = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, numpy.ascontiguousarray(numbers).view("uint8"), raw_dtype=raw)
        else:
            writer.add_tensor(name, numpy.ascontiguousarray(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _dense(source: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and numbers of each tensor of the file of a dense decoder."""
    import numpy

    family = config["model_type"]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, _, found in tensors(source):
        numbers = found
        part = name.split(".")[-2]
        if family == "llama" and part in heads:
            numbers = numpy.ascontiguousarray(interleave(numbers, heads[part]))
        yield gguf_name(name), gguf_mixed.single(numbers) if numbers.ndim == 1 else numbers


def _write_settings(writer: Any, config: dict[str, Any], family: str) -> None:
    rope = config.get("rope_parameters") or config
    writer.add_name(f"random {family}")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: Any, size: int) -> None:
    """Numbers, the first 256 of them replaced by names of bytes, which a vocabulary of this kind must have. They are
    declared ordinary text all the same: the server holds back a token that is half a character.
    """
    import gguf

    tokens = [f"<0x{token:02X}>" if token < 256 else f"▁{token}" for token in range(size)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(token) for token in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


if __name__ == "__main__":
    main()
