"""What a model takes when it runs, told from its configuration and the headers of its files: no weight is read.

For whoever has to choose a machine before anything is loaded. Weights, keys and values and recurrent states are counted
as the loader counts them; what a step takes beside them is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncengine.attention.base import LayerSpec, page_bytes
from asyncengine.attention.factory import kv_dtype
from asyncengine.attention.pool_sizes import TwoPools, two_pools, why_one_pool
from asyncengine.config import EngineConfig
from asyncengine.layers.state_memory import num_states_for, state_bytes
from asyncengine.layers.states import StateSpec
from asyncengine.models.checkpoint import open_checkpoint
from asyncengine.models.decoder import DecoderConfig
from asyncengine.models.encoder import EncoderConfig
from asyncengine.models.encoder_loading import outline_of_encoder, read_encoder_config
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.hub import short_name
from asyncengine.models.loading import quantization_bits, read_model, resolve_device, resolve_dtype
from asyncengine.models.outline import outline_of
from asyncengine.models.purpose import is_headless, pooling_of

_COPIES_OF_LOGITS, _COPIES_OF_STATES = 4, 8
"""How often a step holds logits of the rows it samples, and hidden states of its tokens, in float32."""
_SCALE_BITS = 0.25
"""A bfloat16 for every 64 weights."""
_LONG = 32_768
"""Tokens of the KV cache where nothing says how many, if the model is not shorter: one long request."""
_ENDLESS = 2**62
"""Bytes, of a machine that limits nothing."""


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes, in bytes. Devices and hosts alike."""

    name: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    """Of all layers; 0: it keeps no keys and values."""
    state_bytes: int
    """Of the recurrent states of one sequence, all layers together; 0: it keeps none."""
    num_states: int
    """Slots for them: as `state_memory` says, else for `max_num_seqs` running requests and as many snapshots in at most
    the 4 GiB that a CPU gives. (A device gives more where it has more.)"""
    step_bytes: int
    """About what a step takes beside weights and KV cache, for the engine's largest one."""
    max_model_len: int
    num_heads: int
    """Of attention; 0: it has none."""
    vocab_size: int
    page_size: int
    two_pools: TwoPools | None = None
    """How the KV cache is divided where layers with windows have pages of their own; None: they have not."""

    def kv_tokens(self, config: EngineConfig) -> int:
        """Tokens that the KV cache is to hold: those of `kv_cache_memory`, or those of one long request."""
        if isinstance(config.kv_cache_memory, int) and self.kv_bytes_per_token:
            if self.two_pools is not None:
                return max(self.two_pools.split(config.kv_cache_memory)[0] * self.page_size, 1)
            return max(config.kv_cache_memory // self.kv_bytes_per_token, 1)
        return min(self.max_model_len, _LONG)

    def kv_bytes(self, kv_tokens: int) -> int:
        """Of a KV cache for so many tokens."""
        every = kv_tokens * self.kv_bytes_per_token
        if self.two_pools is None:
            return every
        return min(every, self.two_pools.budget_for(-(-kv_tokens // self.page_size)))

    def total(self, kv_tokens: int) -> int:
        """With a KV cache for so many tokens."""
        states = self.num_states * self.state_bytes
        return self.weight_bytes + self.kv_bytes(kv_tokens) + states + self.step_bytes


class _Sizes(NamedTuple):
    weights: int
    per_token: int
    states: Sequence[StateSpec]
    layers: Sequence[LayerSpec] = ()
    """As far as they are known before anything is loaded."""


def read_needs(path_or_id: str, config: EngineConfig, *, device: torch.device | None = None) -> ModelNeeds:
    """Of the model in a folder, a file or a hub repository (which is downloaded). `device` where it is to run, which
    need not be here; None: the one that `config` would take here.

    Raises what loading it would raise of its files: `ModelNotFound`, `UnsupportedModel`, `InvalidParameter`.
    """
    checkpoint = open_checkpoint(path_or_id, config, writes=config.task == "generate")
    pooling = pooling_of(checkpoint, config)
    whole = pooling is not None and pooling.whole
    if whole:
        hf_config, encoder = read_encoder_config(checkpoint, config)
        max_model_len = encoder.max_model_len
    else:
        headless = is_headless(pooling)
        hf_config, described, max_model_len, checkpoint = read_model(path_or_id, checkpoint, config, headless)
    device = device or resolve_device(config.device)
    dtype = resolve_dtype(config, hf_config, checkpoint, device)
    text = hf_config.get_text_config()
    bits = quantization_bits(config, dtype, device)
    if whole:
        sizes = _of_encoder(encoder, hf_config.model_type, checkpoint, config, dtype, device, bits)
    elif described is not None:
        sizes = _of_decoder(described, checkpoint, config, dtype, device, bits)
    else:
        sizes = _of_module(hf_config, text, config, dtype, bits)
    tokens = config.max_num_batched_tokens
    logits = 0 if whole else min(config.max_num_seqs, tokens) * text.vocab_size * _COPIES_OF_LOGITS
    hidden = tokens * text.hidden_size * _COPIES_OF_STATES
    pools = None
    if why_one_pool(sizes.layers, device, states=bool(sizes.states)) is None:
        pools = two_pools(sizes.layers, config, max_model_len, dtype)
    return ModelNeeds(
        name=short_name(path_or_id),
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=sizes.weights,
        kv_bytes_per_token=sizes.per_token,
        state_bytes=state_bytes(sizes.states, dtype),
        num_states=num_states_for(sizes.states, config, dtype, torch.device("cpu"), _ENDLESS),
        step_bytes=4 * (logits + hidden),
        max_model_len=max_model_len,
        num_heads=getattr(text, "num_attention_heads", 0) if sizes.per_token else 0,
        vocab_size=text.vocab_size,
        page_size=config.page_size,
        two_pools=pools,
    )


def _of_decoder(
    described: DecoderConfig, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None,
) -> _Sizes:  # fmt: skip
    """Of an outline of the decoder without memory."""
    decoder, weights = outline_of(described, checkpoint, config, dtype, device, bits)
    elements = dict(weights.elements)
    vocabulary = sum(elements.pop(path, 0) for path in (described.embedding, described.head))
    plain = _plain(sum(elements.values()), dtype, bits) + _plain(vocabulary, dtype, bits and 8)
    per_token = page_bytes(decoder.specs, 1, kv_dtype(config, dtype))
    return _Sizes(weights.kept_bytes + plain, per_token, decoder.states, decoder.specs)


def _of_encoder(
    described: EncoderConfig, family: str, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None,
) -> _Sizes:  # fmt: skip
    """Of an encoder, which keeps nothing of a text."""
    weights, embeddings = outline_of_encoder(described, family, checkpoint, config, dtype, device, bits)
    matrices = sum(weights.elements.values()) - embeddings
    plain = _plain(matrices, dtype, bits) + _plain(embeddings, dtype, None)
    return _Sizes(weights.kept_bytes + plain, 0, ())


def _of_module(hf_config: Any, text: Any, config: EngineConfig, dtype: torch.dtype, bits: int | None) -> _Sizes:
    """The same of transformers' own module, which has keys and values of one width in every layer."""
    from asyncengine.models.fallback.dummy import count_elements

    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = text.num_hidden_layers * heads * 2 * width * kv_dtype(config, dtype).itemsize
    return _Sizes(_plain(count_elements(hf_config, config, dtype), dtype, bits), per_token, ())


def _plain(elements: int, dtype: torch.dtype, bits: int | None) -> int:
    """Bytes of numbers in the model's type or, on a CPU, quantized by the engine, with the scales of 4 bits."""
    return elements * dtype.itemsize if bits is None else int(elements * (8 if bits == 8 else bits + _SCALE_BITS) / 8)
