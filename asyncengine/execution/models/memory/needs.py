"""Memory that a model needs, estimated from its configuration and the headers of its files: no weight is read.

Weights, KV cache and recurrent states are counted as the loader counts them; the memory of a step is an estimate.
Several models share one budget max-min fairly (progressive filling, as links of a network are shared): weights and
steps come first, and all caches grow alike until one has as much as it can use.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.execution.attention.base import LayerSpec, page_bytes
from asyncengine.execution.attention.factory import kv_dtype
from asyncengine.execution.device.memory import free_bytes, limited_by
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.options import LayerOptions, bits_of
from asyncengine.execution.layers.states import StateSpec
from asyncengine.execution.layers.stored import StoredForm, TensorSlot, bytes_of
from asyncengine.execution.layers.stored_weight import chunk_group, stored_missing
from asyncengine.execution.models import description
from asyncengine.execution.models.checkpoint import CheckpointOptions, open_checkpoint, open_configured
from asyncengine.execution.models.decoder import Decoder, DecoderConfig
from asyncengine.execution.models.decoder_layer import HEAD_BITS
from asyncengine.execution.models.eagle import headed
from asyncengine.execution.models.encoder import Encoder, EncoderConfig
from asyncengine.execution.models.families.encoders import by_stored_name, spelling_of
from asyncengine.execution.models.hub import short_name
from asyncengine.execution.models.memory import caches
from asyncengine.execution.models.multimodal import TextSource
from asyncengine.execution.models.vision.families import VISION
from asyncengine.execution.models.weights import assign, settle_tie, slots_of, stored_forms

logger = logging.getLogger("asyncengine")

_COPIES_OF_LOGITS, _COPIES_OF_STATES = 4, 8
"""Copies in float32 that a step holds of its logits, and of the hidden states of its tokens (an estimate)."""
_SCALE_BITS = 1.0
"""Bits per weight of scale and minimum in 4-bit forms: two bfloat16 for every 32 weights."""
_LONG = 32_768
"""Tokens of the KV cache if there is no setting and the model's context is not shorter: one long request."""
_ENDLESS = 2**62
"""Free bytes of a machine whose memory is no limit."""


class Weights(NamedTuple):
    """Tensors of a model: their names in the checkpoint, and their memory."""

    names: dict[str, str]
    """{name in the checkpoint: name of the slot}"""
    forms: dict[str, StoredForm]
    """Forms of the quantized matrices that stay in their stored form, by module path."""
    kept_bytes: int
    """Bytes of these matrices, and of a prediction head's copy of the output layer."""
    elements: dict[str, int]
    """Number of elements of each other tensor, by module path."""


def outline_decoder(described: description.ModelDescription) -> tuple[Decoder, Weights]:
    """The decoder on the meta device, and its weights. Raises `ModelNotFound` as `assign`."""
    assert isinstance(described.structure, DecoderConfig)
    structure = settle_tie(described.structure, described.checkpoint)
    decoder = Decoder(structure, LayerOptions(described.dtype, torch.device("meta"), LayerKernels()), 1)
    layers = [*decoder.layers, *(() if decoder.mtp is None else decoder.mtp.layers)]
    mixtures = [mixture.experts for layer in layers for mixture in layer.mixtures()]
    experts = [names for each in mixtures for names in each.side_by_side()]
    weights = _weights_of(described, slots_of(decoder, described.checkpoint), structure.ignored, experts)
    path = structure.embedding if structure.tied else structure.head
    if decoder.mtp is not None and decoder.mtp.copies_output and described.bits is None and path not in weights.forms:
        copy = _plain(weights.elements[path], described, HEAD_BITS)
        weights = weights._replace(kept_bytes=weights.kept_bytes + copy)
    return decoder, weights


def outline_encoder(described: description.ModelDescription) -> tuple[Encoder, Weights]:
    """The encoder on the meta device, and its weights. Raises `ModelNotFound` as `assign`."""
    assert isinstance(described.structure, EncoderConfig)
    encoder = Encoder(described.structure, LayerOptions(described.dtype, torch.device("meta"), LayerKernels()))
    slots = by_stored_name(encoder.slots(), described.checkpoint.tensors, spelling_of(described.hf_config.model_type))
    return encoder, _weights_of(described, slots, described.structure.stack.ignored)


def _weights_of(
    described: description.ModelDescription, slots: Mapping[str, TensorSlot], ignored: Sequence[str],
    experts: Sequence[Collection[str]] = (),
) -> Weights:  # fmt: skip
    """The tensors that fill `slots`. `experts`: as in `kept_forms`."""
    names = {} if described.dummy else assign(described.checkpoint, slots, ignored)
    forms = kept_forms(
        stored_forms(described.checkpoint, names), described.dtype, described.device, described.bits, experts
    )
    elements = {name.removesuffix(".weight"): math.prod(slot.shape) for name, slot in slots.items()}
    whole = described.device.type == "cuda"
    kept = sum(bytes_of(each.numbers, elements.pop(path), whole_bytes=whole) for path, each in forms.items())
    return Weights(names, forms, kept, elements)


def kept_forms(
    stored: Mapping[str, StoredForm], dtype: torch.dtype, device: torch.device, bits: int | None,
    experts: Sequence[Collection[str]] = (),
) -> dict[str, StoredForm]:  # fmt: skip
    """The quantized matrices that stay in their stored form: all, or those of at most `bits` bits. `experts`: paths of
    the matrices that are stacked into one weight of all experts.

    None stays if there are no kernels for them. On a GPU, those stay that a kernel reads, and `experts` that are all
    stored alike, with inputs in order. The log says which matrices become dense, and why.
    """
    missing, lost = stored_missing(dtype, device), defaultdict[str, list[str]](list)
    forms = [{stored.get(path) for path in paths} for paths in experts]
    unlike = {
        path for paths, each in zip(experts, forms, strict=True) for path in paths
        if len(each) > 1 or any(form is not None and form.ordered for form in each)
    }  # fmt: skip
    for path, each in stored.items():
        if missing is not None:
            lost[missing].append(path)
        elif device.type == "cuda" and path in unlike:
            lost["not all experts are stored alike, with inputs in order"].append(path)
        elif device.type == "cuda" and chunk_group(each.numbers) is None:
            lost[f"there is no kernel for {each.numbers}"].append(path)
    for why, paths in lost.items():
        names, form = ", ".join(sorted({stored[path].name for path in paths})), str(dtype).removeprefix("torch.")
        logger.warning("%d quantized matrices (%s) become %s: %s", len(paths), names, form, why)
    dense = {path for paths in lost.values() for path in paths}
    return {
        path: each for path, each in stored.items() if path not in dense and (bits is None or each.numbers.bits <= bits)
    }


def check_memory(elements: int, described: description.ModelDescription, kept_bytes: int = 0) -> None:
    """Raise `OutOfMemory` for weights that do not fit into free memory: `elements` numbers, and `kept_bytes` of
    matrices that stay in their stored form.
    """
    bits, device = described.bits, described.device
    need = kept_bytes + (elements * described.dtype.itemsize if bits is None else elements * bits // 8)
    free = free_bytes(device)
    if need > free:
        form = str(described.dtype).removeprefix("torch.") if bits is None else f"int{bits}"
        raise OutOfMemory(
            f"the weights take {need / 2**30:.1f} GiB as {form}, but only {free / 2**30:.1f} GiB are free on {device}"
            + limited_by(device)
        )


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Memory that a model needs, in bytes, on a GPU or a CPU."""

    name: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    """Keys and values of all layers; 0 if the model has no attention."""
    state_bytes: int
    """Recurrent states of one sequence, all layers together; 0 if the model has none."""
    num_states: int
    """Slots for recurrent states: as many as fit into `state_memory`, else for `max_num_seqs` running requests and as
    many snapshots within a CPU's limit of 4 GiB. (A GPU with more memory gets more.)"""
    step_bytes: int
    """Estimate of the engine's largest step without weights and KV cache, in all processes together."""
    max_model_len: int
    num_heads: int
    """Attention heads; 0 if the model has none."""
    vocab_size: int
    page_size: int
    two_pools: caches.TwoPools | None = None
    """Division of the KV cache if layers with windows have pages of their own; None if all layers share pages."""
    image_bytes: int = 0
    """The cache of encoded pictures (`image_cache_memory`); 0 for a model that reads none."""

    def kv_tokens(self, kv_cache_memory: int | str | None) -> int:
        """Tokens that the KV cache holds: those of `kv_cache_memory` bytes; of a long request if that is unset."""
        if isinstance(kv_cache_memory, int) and self.kv_bytes_per_token:
            if self.two_pools is not None:
                return max(self.two_pools.split(kv_cache_memory)[0] * self.page_size, 1)
            return max(kv_cache_memory // self.kv_bytes_per_token, 1)
        return min(self.max_model_len, _LONG)

    def kv_bytes(self, kv_tokens: int) -> int:
        """Bytes of a KV cache for `kv_tokens` tokens."""
        every = kv_tokens * self.kv_bytes_per_token
        if self.two_pools is None:
            return every
        return min(every, self.two_pools.budget_for(-(-kv_tokens // self.page_size)))

    def total(self, kv_tokens: int) -> int:
        """Bytes of weights, caches and a step, with a KV cache for `kv_tokens` tokens."""
        states = self.num_states * self.state_bytes
        return self.weight_bytes + self.kv_bytes(kv_tokens) + states + self.step_bytes + self.image_bytes


def read_needs(path_or_id: str, config: EngineConfig, *, device: torch.device | None = None) -> ModelNeeds:
    """Needs of the model in a folder, a file or a hub repository (which is downloaded). `device`: where it is to run,
    which may be another machine's; None: the device that `config` selects on this machine.

    Raises the errors of loading it: `ModelNotFound`, `UnsupportedModel`, `InvalidParameter`.
    """
    checkpoint = open_configured(path_or_id, config)
    pooling = description.pooling_of(checkpoint, config.task, config.pooling)
    whole = pooling is not None and pooling.whole
    if whole:
        described = description.describe_encoder(checkpoint, config, device)
    else:
        on_cpu = (device or description.resolve_device(config.device)).type == "cpu"
        named = on_cpu and config.draft_model not in (None, "demo/draft")  # the bundled model is no EAGLE-3 head
        options, draft = CheckpointOptions.of(config), str(config.draft_model)
        source = headed(checkpoint, open_checkpoint(draft, options, drafts=True) if named else None)
        described = description.describe_model(path_or_id, source, config, description.is_headless(pooling), device)
    text, tokens = described.hf_config.get_text_config(), config.max_num_batched_tokens
    kv_type, ranks = kv_dtype(config.kv_cache_dtype, described.dtype), config.tensor_parallel
    weight_bytes, per_token, layers, states = _sizes(described, kv_type, ranks, config.trust_remote_code)
    text_source, tower_bytes = described.checkpoint, 0
    pictured = pooling is None and config.images != "off" and described.hf_config.model_type in VISION
    if isinstance(text_source, TextSource) and pictured:
        elements = sum(text_source.whole.tensors[name].elements for name in text_source.of_vision())
        tower_bytes = elements * described.dtype.itemsize
    logits = 0 if whole else min(config.max_num_seqs, tokens) * text.vocab_size * _COPIES_OF_LOGITS
    hidden = tokens * text.hidden_size * _COPIES_OF_STATES
    pools = None
    if caches.why_one_pool(layers, described.device, states=bool(states)) is None:
        pools = caches.two_pools(layers, config, described.max_model_len, described.dtype)
    return ModelNeeds(
        name=short_name(path_or_id), dtype=str(described.dtype).removeprefix("torch."),
        weight_bytes=weight_bytes + tower_bytes, kv_bytes_per_token=per_token,
        state_bytes=caches.state_bytes(states, described.dtype),
        num_states=caches.num_states_for(
            states, config.state_memory, config.max_num_seqs, described.dtype, torch.device("cpu"), _ENDLESS
        ),
        step_bytes=4 * (logits + hidden) * ranks, max_model_len=described.max_model_len,
        num_heads=getattr(text, "num_attention_heads", 0) if per_token else 0, vocab_size=text.vocab_size,
        page_size=config.page_size, two_pools=pools, image_bytes=int(config.image_cache_memory) if tower_bytes else 0,
    )  # fmt: skip


def _sizes(
    described: description.ModelDescription, kv_type: torch.dtype, ranks: int, trust_remote_code: bool
) -> tuple[int, int, Sequence[LayerSpec], Sequence[StateSpec]]:
    """(bytes of weights, bytes of the KV cache per token, layers with a KV cache, recurrent states). `kv_type`: type of
    the KV cache. `ranks`: processes of tensor parallelism; KV heads and states that cannot be divided among them are
    counted once for each."""
    if described.structure is None:
        from asyncengine.execution.models.fallback.model import count_elements

        text = described.hf_config.get_text_config()
        # keys and values of transformers' module have one width in every layer; those of latent attention are expanded
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        latent = getattr(text, "kv_lora_rank", None)
        widths = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim if latent else 2 * width
        elements = count_elements(described.hf_config, described.dtype, trust_remote_code)
        per_token = text.num_hidden_layers * heads * widths * kv_type.itemsize
        return _plain(elements, described, described.bits), per_token, (), ()
    if isinstance(described.structure, EncoderConfig):
        encoder, weights = outline_encoder(described)
        tables = [table for table in (encoder.embedding, encoder.positions, encoder.segments) if table is not None]
        in_tables = sum(math.prod(slot.shape) for table in tables for _, slot in table.slots())
        wide = _wide(weights.elements, described)
        matrices = _matrix_bytes(sum(weights.elements.values()) - in_tables, wide, described)
        return weights.kept_bytes + matrices + _plain(in_tables, described, None), 0, (), ()
    decoder, weights = outline_decoder(described)
    vocabulary = sum(weights.elements.get(path, 0) for path in {decoder.config.embedding, decoder.config.head})
    wide = vocabulary + _wide(weights.elements, described)
    plain = _matrix_bytes(sum(weights.elements.values()), wide, described)
    specs = [spec for spec in decoder.specs for _ in range(ranks if spec.num_kv_heads % ranks else 1)]
    states = [spec for spec in decoder.states for _ in range(ranks if spec.units % ranks else 1)]
    return weights.kept_bytes + plain, page_bytes(specs, 1, kv_type), specs, states


def _wide(elements: Mapping[str, int], described: description.ModelDescription) -> int:
    """Number of elements of the matrices that keep 8 bits when others are quantized to 4."""
    return sum(count for path, count in elements.items() if bits_of(path, described.bits) != described.bits)


def _matrix_bytes(elements: int, wide: int, described: description.ModelDescription) -> int:
    """Bytes of matrices with `elements` numbers, of which `wide` get 8 bits if the model is quantized."""
    return _plain(elements - wide, described, described.bits) + _plain(wide, described, described.bits and 8)


def _plain(elements: int, described: description.ModelDescription, bits: int | None) -> int:
    """Bytes of `elements` numbers in the model's type (`bits` None) or quantized by the engine, scales included."""
    if bits is None:
        return elements * described.dtype.itemsize
    return int(elements * (8 if bits == 8 else bits + _SCALE_BITS) / 8)


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """Demand of one of several models, in bytes. Caches are (least, most): a cache below the first could not run a
    modest request, bytes above the second could not be used; (0, 0) if there is none or its size is a setting."""

    name: str
    fixed: int
    """Weights, a step, and caches whose size is a setting."""
    kv: tuple[int, int] = (0, 0)
    """Keys and values."""
    states: tuple[int, int] = (0, 0)
    """Recurrent states."""

    @property
    def least(self) -> int:
        return self.kv[0] + self.states[0]

    @property
    def most(self) -> int:
        return self.kv[1] + self.states[1]

    def settings(self, share: int) -> dict[str, int]:
        """The configuration fields that give both caches `share` bytes together: each gets its least, and of the rest a
        part in proportion to what it could use."""
        room = self.most - self.least
        states = self.states[0]
        if room:
            states += (share - self.least) * (self.states[1] - self.states[0]) // room
        sizes = {"kv_cache_memory": share - states, "state_memory": states}
        return {name: size for name, size in sizes.items() if size}


def claim_of(
    name: str, needs: ModelNeeds, kv_cache_memory: int | str | None, state_memory: int | str | None, max_num_seqs: int
) -> MemoryClaim:
    """The demand of a model: caches for at least a modest request and at most `max_num_seqs` of full length, or of the
    sizes that the settings give."""
    fixed = needs.weight_bytes + needs.step_bytes
    kv = states = (0, 0)
    if isinstance(kv_cache_memory, int):
        fixed += kv_cache_memory
    else:
        page = needs.page_size * needs.kv_bytes_per_token
        most = max_num_seqs * -(-needs.max_model_len // needs.page_size) + 1
        kv = (caches.modest_pages(needs.page_size, needs.max_model_len) * page, most * page)
    if isinstance(state_memory, int):
        fixed += state_memory
    else:
        states = (2 * needs.state_bytes, (2 * max_num_seqs + 1) * needs.state_bytes)
    return MemoryClaim(name, fixed, kv, states)


def share_memory(budget: int, claims: Sequence[MemoryClaim]) -> list[int]:
    """Bytes of cache for each claim, in order, between its `least` and its `most`. With all fixed bytes they add up to
    at most `budget`.

    Raises `InvalidParameter` naming `memory` and the bytes that would suffice, if not even the least fits.
    """
    needed = sum(claim.fixed + claim.least for claim in claims)
    if needed > budget:
        demands = ", ".join(f"{claim.name} {_mib(claim.fixed + claim.least)}" for claim in claims)
        raise InvalidParameter("memory", f"must be at least {_mib(needed)} for these models ({demands})", _mib(budget))
    shares = [claim.least for claim in claims]
    left = budget - needed
    growing = [index for index, claim in enumerate(claims) if claim.most > claim.least]
    # max-min fairness: in order of what a claim can still use, each gets that or an equal share of the rest
    for served, index in enumerate(sorted(growing, key=lambda index: claims[index].most - claims[index].least)):
        extra = min(claims[index].most - claims[index].least, left // (len(growing) - served))
        shares[index] += extra
        left -= extra
    return shares


def _mib(count: int) -> str:
    return f"{-(-count // 2**20)} MiB"


def divide(
    budget: int, setups: Mapping[str, tuple[str, EngineConfig]], in_turns: bool
) -> dict[str, tuple[EngineConfig, int]]:
    """{name: (configuration with sizes of caches, bytes)} of models that share `budget` bytes. `setups`: {name: (path,
    configuration)}. `in_turns`: models may be in memory one at a time (`assembly.wiring.divide_memory`)."""
    claims = [
        claim_of(name, read_needs(path, config), config.kv_cache_memory, config.state_memory, config.max_num_seqs)
        for name, (path, config) in setups.items()
    ]
    if in_turns and sum(claim.fixed + claim.least for claim in claims) > budget:
        equal = budget // len(claims)
        shares = [share_memory(min(max(equal, one.fixed + one.least), budget), [one])[0] for one in claims]
    else:
        shares = share_memory(budget, claims)
    return {
        one.name: (setups[one.name][1].replace(**one.settings(share)), one.fixed + share)
        for one, share in zip(claims, shares, strict=True)
    }
