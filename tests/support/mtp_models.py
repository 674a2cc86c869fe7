"""Tiny checkpoints with a head that predicts further tokens, which transformers neither writes nor reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.models.decoder import Decoder, DecoderConfig
from asyncengine.execution.models.families import decoder_config_of, native_config
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import OPEN, Batch, Row, StateUse

VOCAB = WIDTH = 64
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0, "eos_token_id": VOCAB - 1,
}  # fmt: skip
_MIXTURE = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "num_hidden_layers": 4, "full_attention_interval": 4, "mtp_num_hidden_layers": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_SHAPE, **_MIXTURE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "deepseek_v3": {
        **_SHAPE, **_MIXTURE, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "q_lora_rank": 24,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
        "num_key_value_heads": 4, "rope_interleave": True,
    },
    "qwen3_5_text": {**_SHAPE, **_LINEAR},
    "qwen3_5_moe_text": {
        **_SHAPE, **_LINEAR, **_MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 48,
    },
    "qwen3_next": {
        **_SHAPE, **_LINEAR, **_MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 48,
    },
}  # fmt: skip


def structure_of(family: str, vocab: int = VOCAB) -> DecoderConfig:
    config = native_config(_content(family, vocab))
    assert config is not None
    made = decoder_config_of(config, 512)
    assert made is not None
    return made


def _content(family: str, vocab: int) -> dict[str, Any]:
    content = {"model_type": family, "architectures": ["ForCausalLM"], "hidden_act": "silu", **CONFIGS[family]}
    return {**content, "vocab_size": vocab, "eos_token_id": 2 if vocab > VOCAB else VOCAB - 1}


def random_tensors(family: str, seed: int = 0, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, those of the head too."""
    generator, structure = torch.Generator().manual_seed(seed), structure_of(family, vocab)
    slots = Decoder(structure, LayerOptions(torch.float32, torch.device("meta"), LayerKernels()), 512).slots()
    found = {}
    for name, slot in slots.items():
        noise = torch.randn(slot.shape, generator=generator)
        if name.endswith("A_log"):
            found[name] = noise - 2.0
        elif len(slot.shape) == 1:
            found[name] = 0.2 * noise + (slot.initial or 0.0)
        else:
            found[name] = noise if "embed" in name else noise * 1.6 / slot.shape[-1] ** 0.5
    return found


def save(
    folder: Path, family: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, **more: Any
) -> Path:
    """`more`: fields of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = len(next(tensor for name, tensor in tensors.items() if "embed" in name))
    content = {**_content(family, vocab), "torch_dtype": str(dtype).removeprefix("torch."), **more}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def planted(family: str, reads: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """A model whose next token is a function of the last one alone, and whose head predicts it well: from the embedding
    of the token that it is given (`reads` "token"), or from the hidden state of the one before ("hidden")."""
    tensors, structure = random_tensors(family, seed), structure_of(family)
    assert structure.mtp is not None
    generator = torch.Generator().manual_seed(seed)
    table = torch.linalg.qr(torch.randn(VOCAB, WIDTH, generator=generator))[0] * WIDTH**0.5
    order = torch.randperm(VOCAB - 1, generator=generator)
    following = torch.arange(VOCAB)
    following[order] = order.roll(-1)  # one long cycle, without the end of an answer
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.mul_(0.01)
        elif tensor.ndim == 1 and "norm" in name:
            tensor.fill_(0.0 if structure.norm.offset else 1.0)
    tensors[f"{structure.embedding}.weight"] = table
    output = torch.empty_like(table)
    output[following] = table
    tensors[f"{structure.head}.weight"] = output / 4
    onward = table.T @ table[following] / WIDTH  # from a token's embedding to that of the next
    token, hidden = torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH)
    if reads == "hidden":
        token, hidden = hidden, onward.T
    tensors[f"{structure.mtp.projection}.weight"] = torch.cat((token, hidden), dim=1)
    return tensors


def watch_guesses(model: Decoder) -> list[torch.Tensor]:
    """The logits [T, vocab] of each run of the model's head from now on, in a list that grows."""
    seen: list[torch.Tensor] = []
    guess = model.guess

    def watched(*given: Any) -> Any:
        logits, hidden = guess(*given)
        seen.append(logits)
        return logits, hidden

    model.guess = watched  # type: ignore[method-assign]
    return seen


def read_and_guess(runner: ModelRunner, text: list[int]) -> list[torch.Tensor]:
    """Logits of a chain of three guesses behind 15 tokens, which came as a prompt in chunks, by decode steps, and by a
    step with drafts of which some are wrong."""
    assert isinstance(runner.model, Decoder)
    assert runner.mtp is not None
    runner.mtp.use(0.0)
    seen = watch_guesses(runner.model)
    spec, pages = RequestSpec(1, tuple(text[:9]), SamplingParams(temperature=0.0), 64), list(range(3, 20))

    def step(start: int, count: int, drafts: tuple[int, ...] = (), source: int = 1, samples: bool = True) -> None:
        state = StateUse(1, source, guesses=(2, 3, 4)[: len(drafts)]) if runner.num_states else None
        tokens = text[: start + count]
        row = Row(spec, 2, start, count + len(drafts), tokens, False, pages, samples, state=state, drafts=drafts)
        runner.launch(Batch(1, (row,))).wait()

    step(0, 4, source=0, samples=False)
    step(4, 5)
    step(9, 1)
    step(10, 1, drafts=(text[11], text[12], text[13] + 1))  # of which the first two stand
    step(13, 1, source=4)
    step(14, 1, drafts=(OPEN,) * 3)
    assert len(seen) == 3
    return seen


def check_chain(
    seen: list[torch.Tensor], run: Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor, tokens: list[int],
) -> None:  # fmt: skip
    """Compare guesses with those of `run`: (logits, what further guesses take for hidden states) of both."""
    for logits in seen:
        expected, chained = run(hidden, tokens)
        torch.testing.assert_close(logits[0], expected[-1].float(), rtol=1e-5, atol=1e-5)
        hidden, tokens = torch.cat((hidden, chained[-1:])), [*tokens, int(expected[-1].argmax())]
