"""EAGLE-3 heads (Li et al. 2025): draft heads that were trained for a model and lie in a folder of their own.

Such a head reads the model's hidden states before some of its layers (`taps`), which the matrix `fc` combines into one
vector, and the embedding of the next token. The attention of its only layer reads both concatenated; a norm and an
output layer of its own, over a subset of the vocabulary, predict the token after. `d2t[i]` is the target token id minus
i for draft token i. The head then reads its own hidden state to draft further: drafts are a chain, not a tree.

Otherwise it is an `MTPHead` like those inside checkpoints, with its tensors named as in the authors' repository, in
SpecForge and SGLang, or in vLLM's speculators.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from asyncengine.errors import InvalidParameter, ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.attention import AttentionConfig
from asyncengine.execution.layers.basic import LMHead, NormConfig
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.layers.rotary import Rotary, RotaryConfig
from asyncengine.execution.layers.stored import StoredMatrix, TensorSlot, plain
from asyncengine.execution.layers.weight_forms import WeightForm
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import MTPConfig, MTPHead, head_layers
from asyncengine.execution.models.families import decoder_config_of, native_config
from asyncengine.execution.models.formats import CheckpointSource
from asyncengine.execution.models.multimodal import TextSource
from asyncengine.execution.models.refusals import is_eagle3
from asyncengine.execution.models.weights import why_no_head

_PREFIX = "mtp."
"""Prefix of the head's tensor names among the model's. A multi-token prediction head of the model is left out."""
_MAP = f"{_PREFIX}d2t"
_UNREAD = ("t2d", "rotary_emb.inv_freq", "embed_tokens.weight")
"""Tensors that are not read: they follow from others, or are the model's embeddings, which training leaves frozen."""
_KNOWN = (
    r"d2t|(fc|norm|lm_head)\.weight|layers\.0\.(self_attn\.[qkvo]_proj\.(weight|bias)|"
    r"(mlp\.(gate|up|down)_proj|input_layernorm|hidden_norm|post_attention_layernorm)\.weight)"
)
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleConfig(MTPConfig):
    """Configuration of an EAGLE-3 head."""

    vocab_size: int = 0
    """Size of the draft vocabulary."""
    norm: NormConfig = field(default_factory=NormConfig)
    rotaries: tuple[RotaryConfig, ...] = ()
    """The rotary embedding of its layer, alone."""
    normed_residual: bool = False
    """Whether the layer's residual stream begins with the normed hidden state (`norm_before_residual`)."""
    maps: bool = True
    """Whether there is a `d2t`; else draft token i is the model's token i."""

    def build(
        self, options: LayerOptions, model: DecoderConfig, pool: int, output: WeightForm, max_model_len: int
    ) -> EagleHead:
        return EagleHead(options, model, self, pool, max_model_len)


class EagleHead(MTPHead):
    """An EAGLE-3 head for the decoder `model`. `pool` as in `MTPHead`."""

    name = "eagle3"
    copies_output = False

    def __init__(
        self, options: LayerOptions, model: DecoderConfig, config: EagleConfig, pool: int, max_model_len: int
    ) -> None:
        head_model = replace(model, norm=config.norm, rotary=config.rotaries, residual_scale=1.0)
        super().__init__(options, head_model, config, pool, None)
        self._config, self._vocab = config, model.vocab_size
        self.rotary = Rotary(config.rotaries[0], max_model_len, options.dtype, options.device)
        self.head = LMHead(options, f"{_PREFIX}lm_head", config.vocab_size, model.width)
        self._targets = torch.arange(config.vocab_size, device=options.device)
        """The model's token id of each draft token."""

    def features(self, hidden: torch.Tensor, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.projection(streams[0])

    def _begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norms[1](hidden)
        return normed if self._config.normed_residual else hidden, self._joined(self.norms[0](embedded), normed)

    def logits(self, x: torch.Tensor, head: LMHead, scaled: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits [T, vocab] of x [T, width], -inf for tokens outside of the draft vocabulary."""
        drafted = self.head(x)
        return drafted.new_full((len(drafted), self._vocab), -torch.inf).index_copy_(1, self._targets, drafted)

    def inner(self) -> Sequence[Any]:
        return [*super().inner(), self.head]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        yield from super().slots()
        if self._config.maps:
            yield _MAP, TensorSlot((self._config.vocab_size,), self._map, initial=0.0)

    def _map(self, offsets: torch.Tensor | StoredMatrix) -> None:
        self._targets.copy_(torch.arange(self._config.vocab_size) + plain(offsets, self._targets.shape).cpu())


@dataclass(frozen=True, slots=True)
class HeadedCheckpoint(TextSource):
    """A model's checkpoint joined with that of an EAGLE-3 head."""

    head: CheckpointSource

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        if not name.startswith(_PREFIX):
            return self.whole.read(name)
        tensor = self.head.read(self.names[name])
        return tensor.double() if name == _MAP and isinstance(tensor, torch.Tensor) else tensor

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        self.whole.release(tensor)
        self.head.release(tensor)


def headed(whole: CheckpointSource, head: CheckpointSource | None) -> CheckpointSource:
    """A model's checkpoint joined with `head`, if that is an EAGLE-3 head's. Raises `ModelNotFound` naming a tensor
    that no such head has."""
    if head is None or not is_eagle3(head.config):
        return whole
    names, tensors = {}, {name: tensor for name, tensor in whole.tensors.items() if not name.startswith(_PREFIX)}
    for stored, tensor in head.tensors.items():
        name = re.sub(r"^midlayer\.", "layers.0.", stored.removeprefix("model."))
        if not name.endswith(_UNREAD):
            if not re.fullmatch(_KNOWN, name):
                raise ModelNotFound(f"draft_model: {head.folder} has a tensor that no EAGLE-3 head has: {stored}")
            # declared as float64, the integers pass the check of dtypes; it represents every token id exactly
            tensors[_PREFIX + name] = tensor._replace(dtype="F64") if name == "d2t" else tensor
            names[_PREFIX + name] = stored
    left_out = whole.left_out if isinstance(whole, TextSource) else ()
    files = (*whole.files, *head.files)
    return HeadedCheckpoint(whole, whole.folder, whole.config, files, whole.metadata, names, tensors, left_out, head)


def with_eagle(structure: DecoderConfig | None, source: CheckpointSource, length: int) -> DecoderConfig | None:
    """The decoder with the EAGLE-3 head that was joined to its checkpoint, if any, for sequences of up to `length`
    tokens. Raises `InvalidParameter`, `ModelNotFound` or `UnsupportedModel` naming the field or tensor that does not
    fit."""
    if not isinstance(source, HeadedCheckpoint) or structure is None:
        return structure
    folder, content = source.head.folder, source.head.config
    layer_config = content.get("transformer_layer_config")
    content = {"eos_token_id": None, **content, **(layer_config if isinstance(layer_config, Mapping) else {})}
    config = native_config(content) if content.get("model_type") == "llama" else None
    drafter = None if config is None else decoder_config_of(config, length)
    if drafter is None:
        raise UnsupportedModel(
            f"draft_model: {folder} has a layer of the family {shorten(repr(content.get('model_type')), 80)}, or lacks "
            "fields of it; EAGLE-3 heads of 'llama' are read"
        )
    _check(folder, content, drafter, structure)
    attention = drafter.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    layer = replace(
        drafter.layers[0], before_attention=None, attention=replace(attention, inputs=2 * drafter.width, rotary=0)
    )
    layer_prefix = f"{_PREFIX}layers.0."
    head = EagleConfig(
        head_layers((layer,)), f"{_PREFIX}layers.{{}}.", f"{layer_prefix}input_layernorm", f"{layer_prefix}hidden_norm",
        f"{_PREFIX}fc", f"{_PREFIX}norm", taps=_taps(content, len(structure.layers)),
        vocab_size=content.get("draft_vocab_size") or drafter.vocab_size, norm=drafter.norm, rotaries=drafter.rotary,
        normed_residual=bool(content.get("norm_before_residual", layer_config is not None)),
        maps=_MAP in source.names or content.get("draft_vocab_size") not in (None, drafter.vocab_size),
    )  # fmt: skip
    extended = replace(structure, mtp=head, ignored=(*structure.ignored, rf"{re.escape(_PREFIX)}.*"))
    if not source.head.files:
        return extended
    if (reason := why_no_head(extended, source)) is not None:
        raise ModelNotFound(f"draft_model: {folder}: {reason.replace(_PREFIX, '')}")
    if head.maps:
        targets = set((torch.arange(head.vocab_size) + plain(source.read(_MAP), (head.vocab_size,))).tolist())
        if len(targets) < head.vocab_size or not targets <= set(range(structure.vocab_size)):
            raise ModelNotFound(f"draft_model: {folder}: d2t must name distinct tokens below {structure.vocab_size}")
    return extended


def _check(folder: Path, content: Mapping[str, Any], head: DecoderConfig, model: DecoderConfig) -> None:
    """Refuse a head of another model, or an unsupported variant. Raises `InvalidParameter` or `UnsupportedModel`."""
    target = content.get("target_hidden_size") or model.width
    for name, actual, expected in (
        ("hidden_size", head.width, model.width), ("target_hidden_size", target, model.width),
        ("vocab_size", head.vocab_size, model.vocab_size), ("num_hidden_layers", len(head.layers), 1),
    ):  # fmt: skip
        if actual != expected:
            raise InvalidParameter("draft_model", f"has {name}={actual} where this model needs {expected}", str(folder))
    inner = content.get("eagle_config")
    settings = {**content, **(inner if isinstance(inner, Mapping) else {})}
    for name, expected in (("use_aux_hidden_state", True), ("norm_before_fc", False), ("parallel_drafting", False)):
        if bool(settings.get(name, expected)) != expected:
            raise UnsupportedModel(f"draft_model: {folder} has {name}={settings[name]}, a form that is not read")
    if model.embedding_scale != 1.0 or model.positions or model.embedding_norm or model.embedding_width:
        raise UnsupportedModel("draft_model: this model's embeddings are changed before its first layer, which a head "
                               "of the EAGLE-3 form does not know")  # fmt: skip


def _taps(content: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers of the model before which the head reads hidden states, as in vLLM's speculators. SGLang and SpecForge
    (whose field is in `eagle_config`) name the layers after which it does: one less."""
    inner, taps = content.get("eagle_config"), content.get(_IDS) or (2, layers // 2, layers - 3)
    if not content.get(_IDS) and isinstance(inner, Mapping) and isinstance(inner.get(_IDS), list):
        taps = [layer + 1 if isinstance(layer, int) else layer for layer in inner[_IDS]]
    numbers = isinstance(taps, (list, tuple)) and all(type(layer) is int and 0 <= layer <= layers for layer in taps)
    if not numbers or len(set(taps)) != len(taps):
        limit = f"has {_IDS}={shorten(str(taps), 80)}, which must be distinct numbers from 0 to {layers}"
        raise InvalidParameter("draft_model", limit, None)
    return tuple(sorted(taps))
