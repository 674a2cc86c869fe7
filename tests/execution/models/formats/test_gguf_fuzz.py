"""Mutated GGUF files in short; `ASYNCENGINE_LONG=50` runs more, and so does the fuzzer's own command."""

from __future__ import annotations

from pathlib import Path

from support.gguf_bytes import STRING, array, text
from support.gguf_files import QUANTIZED, checkpoint_of, write_gguf
from support.gguf_models import YARN
from support.gguf_models import make_model as random_model
from support.long import TIMES
from support.ollama_gpt_oss import write_ollama_gpt_oss
from support.tiny_configs import changed
from support.tiny_models import FAMILIES, make_model
from transformers import LlamaConfig

from .gguf_fuzz import run

CASES = 400 * TIMES


def seed_files(folder: Path) -> list[bytes]:
    """Whole models of several families, one with every quantized type."""
    made = []
    for name in ("llama3.1-rope", "gemma3", "qwen3moe", "stablelm"):
        path = folder / f"{name}.gguf"
        more = {"tokenizer.chat_template": "{{ x }}", "general.sampling.top_k": 5, "tokenizer.ggml.eot_token_id": 7}
        weights = checkpoint_of(make_model(name), folder / name)
        write_gguf(path, FAMILIES[name](), weights, lambda *_: "F16", more)
        made.append(path.read_bytes())
    for name in ("qwen3.5", "granite4", "qwen3next", "nemotron-3", "kimi-linear"):
        config = changed(name, mlp_only_layers=[])() if name == "qwen3next" else FAMILIES[name]()
        kind_of = lambda _, tensor: "F32" if tensor.shape[-1] % 32 else "Q8_0"  # noqa: E731
        weights = checkpoint_of(random_model(config), folder / name)
        write_gguf(path, config, weights, kind_of, legacy=name == "qwen3next")
        made.append(path.read_bytes())
    oss = changed("gpt-oss", hidden_size=64, intermediate_size=32, rope_parameters=YARN)()
    write_ollama_gpt_oss(path, oss, dict(random_model(oss).state_dict()), "first")
    made.append(path.read_bytes())
    kinds = iter([*QUANTIZED, *QUANTIZED])
    config = LlamaConfig(
        vocab_size=8, hidden_size=256, head_dim=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2
    )
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    write_gguf(folder / "types.gguf", config, dict(model.state_dict()), lambda *_: next(kinds))
    content = (folder / "types.gguf").read_bytes()
    words = array("tokenizer.ggml.tokens", STRING, 50, b"".join(text(f"w{index}") for index in range(50)))
    count = int.from_bytes(content[16:24], "little") + 1
    made.append(content[:16] + count.to_bytes(8, "little") + words + content[24:])
    return [*made, content]


def test_mutated_files(tmp_path: Path) -> None:
    """Files are opened, refused as broken or refused as unsupported: all three come up, and nothing else."""
    found = run(seed_files(tmp_path), CASES, tmp_path)
    assert set(found) == {"opened", "ModelNotFound", "UnsupportedModel"}
