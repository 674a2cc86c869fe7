"""Whether trainer and engine agree to the bit over a whole GRPO training, for several kinds of models and types:

    nice -n 10 python -m benchmarks.exact_grpo [--kinds moe] [--dtypes float32]

TRL's GRPOTrainer, unchanged, trains a random model of a few layers with an engine in vLLM's place and `make_exact`. The
engine is kept busy: prompts in chunks, requests that are preempted, a prefix cache, guesses wherever there are any
(none of a hybrid). Printed for each run: the largest of all steps' `sampling/sampling_logp_difference` (mean and max,
TRL's own metrics, which are 0 where the two agree), how far the weights moved, and what the engine did meanwhile. Needs
asyncengine[trl]; the variable matters on a CPU with AMX alone, whose matrix unit's sums of bfloat16 depend on what is
computed together.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from asyncengine import DEMO_MODEL, Engine
from asyncengine.integrations.trl import attach, make_exact

_SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 3, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 2 + ["full_attention"]
    + ["linear_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 3,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "llama": ("LlamaConfig", {}),
    "gemma": ("Gemma3TextConfig", {"sliding_window": 16, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 24}),
    "moe": ("Qwen3MoeConfig", _EXPERTS),
    "hybrid": ("Qwen3_5TextConfig", _LINEAR),
}
"""A configuration's class and its fields beside the sizes."""
BUSY: dict[str, Any] = {
    "kv_cache_memory": "8MB", "num_threads": 1, "show_progress": False, "max_num_batched_tokens": 48, "page_size": 4,
    "preempt_every": 7, "speculation_costs": (1.0, 1.0002, 1.0008),
}  # fmt: skip
_ANIMALS = ("cat", "dog", "cow", "fox", "hen", "duck", "mouse", "horse")


def checkpoint(kind: str, dtype: str, folder: Path) -> Path:
    """A random model of that kind with the demo model's tokenizer."""
    name, fields = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**_SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:  # large enough that answers wander
                each.copy_(torch.randn_like(each) * (0.1 if each.shape[0] == 2048 else 1.5 / each.shape[-1] ** 0.5))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    return folder


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that no two answers have alike: how many different tokens they have, and how large these are."""
    return [len(set(ids)) + sum(ids) / 2048 / max(len(ids), 1) for ids in completion_ids]


def measure(kind: str, dtype: str, steps: int, folder: Path) -> dict[str, Any]:
    """One training."""
    path = checkpoint(kind, dtype, folder / "model")
    asked = [{"role": "user", "content": f"Tell me a story about a {animal} named Tim."} for animal in _ANIMALS]
    args = GRPOConfig(
        output_dir=str(folder / "out"), max_steps=steps, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=24, learning_rate=1e-3, lr_scheduler_type="constant", logging_steps=1, use_cpu=True,
        bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, temperature=0.8, top_p=1.0, top_k=0,
        seed=1, router_aux_loss_coef=0.0,
    )  # fmt: skip
    with Engine.from_pretrained(path, dtype=dtype, **BUSY) as engine:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        before = [each.detach().clone() for each in model.parameters()]
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        data = Dataset.from_dict({"prompt": [[each] for each in asked]})
        trainer = GRPOTrainer(
            model=model, reward_funcs=variety, args=args, train_dataset=data, processing_class=tokenizer
        )
        trainer.remove_callback(transformers.PrinterCallback)
        attach(trainer, engine)
        exact = make_exact(trainer.model, engine, temperature=trainer.temperature)
        trainer.train()
        exact.close()
        stats = engine.stats()
        moved = sum(int((a != b).sum()) for a, b in zip(before, model.parameters(), strict=True))
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    name = "sampling/sampling_logp_difference"
    ratios = [entry[f"sampling/importance_sampling_ratio/{end}"] for entry in logged for end in ("min", "max")]
    return {
        "steps": len(logged), "mean": max(entry[f"{name}/mean"] for entry in logged),
        "max": max(entry[f"{name}/max"] for entry in logged), "ratios": [min(ratios), max(ratios)],
        "weights moved": round(moved / sum(each.numel() for each in before), 3),
        "reward": [round(sum(each["reward"] for each in part) / len(part), 2) for part in (logged[:10], logged[-10:])],
        "tokens": stats.generated_tokens, "preempted": stats.preemptions, "cached": stats.cached_tokens,
        "guessed": 0 if stats.speculation is None else stats.speculation.drafted,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    flags = parser.parse_args()
    for kind in flags.kinds:
        for dtype in flags.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                print(kind, dtype, json.dumps(measure(kind, dtype, flags.steps, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
