"""A tiny Llama, and heads of the EAGLE-3 form for it as their authors' repository, SpecForge and vLLM write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncengine.demo import MODEL_PATH

VOCAB, WIDTH, LAYERS, DRAFTED = 2048, 64, 8, 1600
FIRST, KNOWN = 5, 24
"""The tokens that a planted model writes."""
_SHAPE = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
MODEL: dict[str, Any] = {
    **_SHAPE, "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "num_hidden_layers": LAYERS,
}  # fmt: skip
HEAD: dict[str, Any] = {
    **_SHAPE, "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": DRAFTED,
    "num_hidden_layers": 1, "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def _layer(prefix: str, generator: torch.Generator, inputs: int) -> Tensors:
    shapes = {
        "self_attn.q_proj": (WIDTH, inputs), "self_attn.k_proj": (WIDTH // 2, inputs),
        "self_attn.v_proj": (WIDTH // 2, inputs), "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (96, WIDTH),
        "mlp.up_proj": (96, WIDTH), "mlp.down_proj": (WIDTH, 96),
    }  # fmt: skip
    made = {f"{prefix}{name}.weight": _matrix(generator, shape) for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm", *(() if inputs == WIDTH else ("hidden_norm",)))
    return made | {f"{prefix}{name}.weight": 1 + 0.2 * torch.randn(WIDTH, generator=generator) for name in norms}


def _matrix(generator: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def model_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    made = {
        "model.embed_tokens.weight": torch.randn(VOCAB, WIDTH, generator=generator),
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": _matrix(generator, (VOCAB, WIDTH)),
    }
    for index in range(LAYERS):
        made |= _layer(f"model.layers.{index}.", generator, WIDTH)
    return made


def head_tensors(seed: int = 1) -> Tensors:
    """Tensors as the authors' repository names them, of a head that guesses `DRAFTED` of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[targets] = True
    return {
        **_layer("midlayer.", generator, 2 * WIDTH), "fc.weight": _matrix(generator, (WIDTH, 3 * WIDTH)),
        "norm.weight": 1 + 0.2 * torch.randn(WIDTH, generator=generator),
        "lm_head.weight": _matrix(generator, (DRAFTED, WIDTH)), "d2t": targets - torch.arange(DRAFTED), "t2d": seen,
    }  # fmt: skip


def save(folder: Path, content: dict[str, Any], tensors: Tensors, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**content, "torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    stored = {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}
    save_file({name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors")
    return folder


def save_model(folder: Path, tensors: Tensors, dtype: torch.dtype = torch.float32) -> Path:
    """The tiny model with the demo model's tokenizer, for grammars."""
    save(folder, MODEL, tensors, dtype)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_PATH / name, folder)
    return folder


def planted(reads: str, seed: int = 0) -> tuple[Tensors, Tensors]:
    """A model whose next token is a function of the last one alone, and a head that says the same: by the embedding of
    the token that it is given (`reads` "token"), or by the stream of the position before ("hidden").

    Embeddings have 1 + 24 dimensions that are not 0: the first is the same for all tokens, and gives queries and keys
    that each position attends to itself by. Values change what the stream says of one token into what it says of the
    next.
    """
    model, head = model_tensors(seed), head_tensors(seed + 1)
    generator = torch.Generator().manual_seed(seed)
    following = torch.randperm(KNOWN, generator=generator)
    following = torch.empty_like(following).index_copy_(0, following, following.roll(-1))  # one cycle
    own = torch.linalg.qr(torch.randn(KNOWN, KNOWN, generator=generator))[0] * (WIDTH - 16) ** 0.5
    embedded = torch.zeros(VOCAB, WIDTH)
    embedded[FIRST : FIRST + KNOWN, 0], embedded[FIRST : FIRST + KNOWN, 1 : 1 + KNOWN] = 4.0, own
    output = torch.zeros(VOCAB, WIDTH)
    output[FIRST + following, 1 : 1 + KNOWN] = own / 4
    for name, tensor in (*model.items(), *head.items()):
        if "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.01)
    model |= {"model.embed_tokens.weight": embedded, "lm_head.weight": output}
    onward = own.T @ own[following] / (WIDTH - 16)  # from a token's embedding to that of the next
    token, hidden = torch.eye(KNOWN), -torch.eye(KNOWN)
    if reads == "hidden":
        token, hidden = torch.zeros_like(token), onward.T - torch.eye(KNOWN)
    attention = "midlayer.self_attn."
    for name, heads in (("q_proj", 4), ("k_proj", 2)):
        rows = head[f"{attention}{name}.weight"].zero_().view(heads, 2, 8, 2 * WIDTH)
        rows[:, 0, :, 0] = 4.0
    values = head[f"{attention}v_proj.weight"].zero_()
    values[:KNOWN, 1 : 1 + KNOWN], values[:KNOWN, 1 + WIDTH : 1 + WIDTH + KNOWN] = token, hidden
    back = head[f"{attention}o_proj.weight"].zero_()
    for place in range(KNOWN):  # two query heads read the same keys and values: one of them is used
        back[1 + place, place % 16 + 32 * (place // 16)] = 1.0
    head["fc.weight"].zero_()[:, WIDTH : 2 * WIDTH] = torch.eye(WIDTH)
    head["d2t"] = torch.full((DRAFTED,), 3)
    return model, head | {"lm_head.weight": output[3 : 3 + DRAFTED]}
