"""TRL's tests of GRPOTrainer with an engine in vLLM's place:

    python -m benchmarks.suites.trl_grpo [--source FOLDER] [PYTEST'S ARGUMENTS]

--source: a checkout of TRL, whose own `trl` is what runs. Every trainer that a test makes gets an engine of its model
by `attach`. The tests that need vLLM, which TRL itself skips for want of a server to mock, run too. Models and data
that TRL keeps on a hub are made here under the same names, with the demo model's tokenizer; `LEFT_OUT` says what
depends on the real ones, or on more than generation. Needs asyncengine[trl].
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from asyncengine import DEMO_MODEL, Engine
from asyncengine.integrations.trl import attach
from benchmarks.suites.served import parser, run, source

REFERENCE = "v1.9.0"
FILE = "tests/test_grpo_trainer.py"
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "trains on pictures": ("TestGRPOTrainerVLM", "vlm"),
    "replaces the method that samples in transformers, and expects it to be called": (
        "test_train_with_mask_truncated_completions[", "test_train_with_mask_truncated_completions_all_masked",
        "test_train_with_tools", "environment", "test_train_with_malformed_tool_calls", "continuous_batching",
    ),
    "names a sampling parameter of transformers": ("test_train_with_generation_kwargs",),
    "a random model is 1e-23 as likely to write the form as the sampler, which is TRL's factor of the loss": (
        "test_train_vllm_structured_outputs",
    ),
    "loads code from a hub": ("test_trust_remote_code",),
    "needs a GPU": ("TestGRPOTrainerSlow",),
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
HUB = "trl-internal-testing/tiny-"
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2", {}),
    f"{HUB}Qwen2ForCausalLM-2.5": ("Qwen2", {}),
    f"{HUB}Qwen3ForCausalLM": ("Qwen3", {}),
    f"{HUB}Qwen3MoeForCausalLM": ("Qwen3Moe", EXPERTS),
    f"{HUB}LlamaForCausalLM-3.2": ("Llama", {}),
    f"{HUB}MistralForCausalLM-0.2": ("Mistral", {}),
    f"{HUB}Gemma2ForCausalLM": ("Gemma2", {}),
    f"{HUB}Cohere2ForCausalLM": ("Cohere2", {}),
    f"{HUB}GptOssForCausalLM": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    f"{HUB}Glm4MoeForCausalLM": (
        "Glm4Moe", {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    ),
    f"{HUB}Qwen2ForSequenceClassification-2.5": ("Qwen2", {"num_labels": 1}),
    f"{HUB}Qwen3ForSequenceClassification": ("Qwen3", {"num_labels": 1}),
    f"{HUB}LlamaForSequenceClassification-3.2": ("Llama", {"num_labels": 1}),
}  # fmt: skip
TEXTS = (
    "Beautiful is better than", "Explicit is", "Simple is better", "Complex", "Flat is better than", "Sparse",
    "Readability", "Special cases aren't special", "Although", "Errors should never", "Unless explicitly", "Now is",
    "In the face", "There should be", "Although that way may not", "Although never is often", "If it is hard",
)  # fmt: skip


def make_hub(folder: Path) -> None:
    """Write the models and the data under their names on the hub; a path that exists is taken before a hub is asked."""
    for name, (family, changed) in MODELS.items():
        kind = "ForSequenceClassification" if "num_labels" in changed else "ForCausalLM"
        config = getattr(hf, f"{family}Config")(
            **SIZES, **changed, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
        )
        torch.manual_seed(0)
        getattr(hf, f"{family}{kind}")(config).save_pretrained(folder / name)
        hf.AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder / name)
    data = folder / "trl-internal-testing" / "zen"
    described = ["---", "configs:"]
    for name in ("standard_prompt_only", "conversational_prompt_only"):
        described += [f"- config_name: {name}", "  data_files:"]
        (data / name).mkdir(parents=True, exist_ok=True)
        for split, texts in (("train", TEXTS), ("test", TEXTS[:2])):
            prompts = texts if name.startswith("standard") else [[{"role": "user", "content": text}] for text in texts]
            lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
            (data / name / f"{split}.jsonl").write_text(lines, encoding="utf-8")
            described += [f"  - split: {split}", f"    path: {name}/{split}.jsonl"]
    (data / "README.md").write_text("\n".join([*described, "---", ""]), encoding="utf-8")


# ---------------------------------------------------------------- the plugin, inside of pytest


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what `LEFT_OUT` names, and let those run that only vLLM's absence skips."""
    words = [word for names in LEFT_OUT.values() for word in names]
    left = [item for item in items if any(word in f"{item.nodeid}[" for word in words)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if "vllm" not in mark.kwargs.get("reason", "").lower()]


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every trainer of the test has an engine, which is closed after it."""
    from trl.trainer import grpo_trainer

    opened: list[Engine] = []
    trained = grpo_trainer.GRPOTrainer.__init__

    def init(trainer: Any, *given: Any, **more: Any) -> None:
        trained(trainer, *given, **more)
        path = trainer.model.config._name_or_path
        opened.append(Engine.from_pretrained(path, dtype="float32", show_progress=False, kv_cache_memory="64MiB"))
        attach(trainer, opened[-1])

    monkeypatch.chdir(os.environ["TRL_HUB"])
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", lambda **_: None)
    monkeypatch.setattr(grpo_trainer.GRPOTrainer, "__init__", init)
    yield
    for engine in opened:
        generated = engine.stats().generated_tokens
        engine.close()
        print(f"tokens of the engine: {generated}")


def main() -> int:
    flags = parser(__doc__)
    args, more = flags.parse_known_args()
    folder = source(args.source, "huggingface/trl", REFERENCE, args.work)
    hub = (args.work / "trl-hub").resolve()
    shutil.rmtree(hub, ignore_errors=True)
    make_hub(hub)
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    variables = {
        **os.environ,
        "PYTHONPATH": paths,
        "TRL_HUB": str(hub),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.suites.trl_grpo", "-p", "no:cacheprovider"]
    for reason, names in LEFT_OUT.items():
        print(f"left out, {reason}: {', '.join(names)}")
    return run([*command, FILE, *more], cwd=folder, env=variables)


if __name__ == "__main__":
    sys.exit(main())
