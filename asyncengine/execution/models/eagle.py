"""Heads of the EAGLE-3 form (Li et al. 2025), which were trained apart from the model that they guess for.

Such a head reads what the model's stream is before some of its layers, made one by a matrix (`fc`), and the token
behind. The attention of its one layer reads both side by side; a norm and an output layer of its own, over a part of
the vocabulary, give the next token. `d2t` has, for each token of that part, how far the model's number of it lies from
its own. Fed with what its layer gave, the head guesses further: guesses are a chain, trees are not made.

Beside that, it is a head as others that checkpoints have (`decoder_layer.MTPHead`), with its tensors in another folder:
those of the authors' repository, of SpecForge and SGLang, or of vLLM's speculators.
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
from asyncengine.execution.models.multimodal import TextPart
from asyncengine.execution.models.refusals import is_eagle3
from asyncengine.execution.models.weights import why_no_head

_PREFIX = "mtp."
"""The beginning of the head's names beside those of the model, whose own head is left out."""
_MAP = f"{_PREFIX}d2t"
_UNREAD = ("t2d", "rotary_emb.inv_freq", "embed_tokens.weight")
"""Tensors that follow from others. Embeddings are those of the model, which training leaves as they are."""
_KNOWN = (
    r"d2t|(fc|norm|lm_head)\.weight|layers\.0\.(self_attn\.[qkvo]_proj\.(weight|bias)|"
    r"(mlp\.(gate|up|down)_proj|input_layernorm|hidden_norm|post_attention_layernorm)\.weight)"
)
_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class EagleConfig(MTPConfig):
    """A head of this form."""

    vocab_size: int = 0
    """Tokens that it can guess."""
    norm: NormConfig = field(default_factory=NormConfig)
    rotaries: tuple[RotaryConfig, ...] = ()
    """The one of its layer."""
    normed_residual: bool = False
    """Whether the layer's residual stream begins with the normed hidden state (`norm_before_residual`)."""
    maps: bool = True
    """Whether there is a `d2t`; else its first tokens are the model's."""

    def build(
        self, options: LayerOptions, model: DecoderConfig, pool: int, output: WeightForm, max_model_len: int
    ) -> EagleHead:
        return EagleHead(options, model, self, pool, max_model_len)


class EagleHead(MTPHead):
    """A head of this form, of the decoder `model`. `pool` as in `MTPHead`."""

    name = "eagle3"
    copies_output = False

    def __init__(
        self, options: LayerOptions, model: DecoderConfig, config: EagleConfig, pool: int, max_model_len: int
    ) -> None:
        own = replace(model, norm=config.norm, rotary=config.rotaries, residual_scale=1.0)
        super().__init__(options, own, config, pool, None)
        self._own, self._vocab = config, model.vocab_size
        self.rotary = Rotary(config.rotaries[0], max_model_len, options.dtype, options.device)
        self.head = LMHead(options, f"{_PREFIX}lm_head", config.vocab_size, model.width)
        self._targets = torch.arange(config.vocab_size, device=options.device)
        """The model's number of each token."""

    def features(self, hidden: torch.Tensor, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.projection(streams[0])

    def _begin(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norms[1](hidden)
        return normed if self._own.normed_residual else hidden, self._joined(self.norms[0](embedded), normed)

    def logits(self, x: torch.Tensor, head: LMHead, scaled: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Logits [T, vocab] of x [T, width], -inf for tokens that it cannot guess."""
        made = self.head(x)
        return made.new_full((len(made), self._vocab), -torch.inf).index_copy_(1, self._targets, made)

    def inner(self) -> Sequence[Any]:
        return [*super().inner(), self.head]

    def slots(self) -> Iterator[tuple[str, TensorSlot]]:
        yield from super().slots()
        if self._own.maps:
            yield _MAP, TensorSlot((self._own.vocab_size,), self._map, initial=0.0)

    def _map(self, offsets: torch.Tensor | StoredMatrix) -> None:
        self._targets.copy_(torch.arange(self._own.vocab_size) + plain(offsets, self._targets.shape).cpu())


@dataclass(frozen=True, slots=True)
class HeadedCheckpoint(TextPart):
    """A model's checkpoint, and beside its tensors those of a head of this form."""

    head: CheckpointSource

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        if not name.startswith(_PREFIX):
            return self.whole.read(name)
        found = self.head.read(self.names[name])
        return found.double() if name == _MAP and isinstance(found, torch.Tensor) else found

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        self.whole.release(tensor)
        self.head.release(tensor)


def headed(whole: CheckpointSource, head: CheckpointSource | None) -> CheckpointSource:
    """A model's checkpoint with that of its head, if `head` is one. Raises `ModelNotFound` naming a tensor that no such
    head has."""
    if head is None or not is_eagle3(head.config):
        return whole
    names, tensors = {}, {name: each for name, each in whole.tensors.items() if not name.startswith(_PREFIX)}
    for stored, each in head.tensors.items():
        name = re.sub(r"^midlayer\.", "layers.0.", stored.removeprefix("model."))
        if not name.endswith(_UNREAD):
            if not re.fullmatch(_KNOWN, name):
                raise ModelNotFound(f"draft_model: {head.folder} has a tensor that no EAGLE-3 head has: {stored}")
            # whole numbers are read as this type, which has all that there are tokens
            tensors[_PREFIX + name] = each._replace(kind="F64") if name == "d2t" else each
            names[_PREFIX + name] = stored
    parts = whole.left_out if isinstance(whole, TextPart) else ()
    files = (*whole.files, *head.files)
    return HeadedCheckpoint(whole, whole.folder, whole.config, files, whole.metadata, names, tensors, parts, head)


def with_eagle(structure: DecoderConfig | None, source: CheckpointSource, length: int) -> DecoderConfig | None:
    """The decoder with the head that its checkpoint has beside it, if it has one, for sequences of up to `length`
    tokens. Raises `InvalidParameter`, `ModelNotFound` or `UnsupportedModel` naming the field or the tensor that does
    not fit."""
    if not isinstance(source, HeadedCheckpoint) or structure is None:
        return structure
    folder, content = source.head.folder, source.head.config
    inner = content.get("transformer_layer_config")
    content = {"eos_token_id": None, **content, **(inner if isinstance(inner, Mapping) else {})}
    config = native_config(content) if content.get("model_type") == "llama" else None
    made = None if config is None else decoder_config_of(config, length)
    if made is None:
        raise UnsupportedModel(
            f"draft_model: {folder} has a layer of the family {shorten(repr(content.get('model_type')), 80)}, or lacks "
            "fields of it; EAGLE-3 heads of 'llama' are read"
        )
    _check(folder, content, made, structure)
    attention = made.layers[0].attention
    assert isinstance(attention, AttentionConfig)
    layer = replace(
        made.layers[0], before_attention=None, attention=replace(attention, inputs=2 * made.width, rotary=0)
    )
    first = f"{_PREFIX}layers.0."
    head = EagleConfig(
        head_layers((layer,)), f"{_PREFIX}layers.{{}}.", f"{first}input_layernorm", f"{first}hidden_norm",
        f"{_PREFIX}fc", f"{_PREFIX}norm", taps=_taps(content, len(structure.layers)),
        vocab_size=content.get("draft_vocab_size") or made.vocab_size, norm=made.norm, rotaries=made.rotary,
        normed_residual=bool(content.get("norm_before_residual", inner is not None)),
        maps=_MAP in source.names or content.get("draft_vocab_size") not in (None, made.vocab_size),
    )  # fmt: skip
    found = replace(structure, mtp=head, ignored=(*structure.ignored, rf"{re.escape(_PREFIX)}.*"))
    if not source.head.files:
        return found
    if (reason := why_no_head(found, source)) is not None:
        raise ModelNotFound(f"draft_model: {folder}: {reason.replace(_PREFIX, '')}")
    if head.maps:
        targets = set((torch.arange(head.vocab_size) + plain(source.read(_MAP), (head.vocab_size,))).tolist())
        if len(targets) < head.vocab_size or not targets <= set(range(structure.vocab_size)):
            raise ModelNotFound(f"draft_model: {folder}: d2t must name distinct tokens below {structure.vocab_size}")
    return found


def _check(folder: Path, content: Mapping[str, Any], head: DecoderConfig, model: DecoderConfig) -> None:
    """Refuse a head of another model, and forms that are not written down."""
    target = content.get("target_hidden_size") or model.width
    for name, own, wanted in (
        ("hidden_size", head.width, model.width), ("target_hidden_size", target, model.width),
        ("vocab_size", head.vocab_size, model.vocab_size), ("num_hidden_layers", len(head.layers), 1),
    ):  # fmt: skip
        if own != wanted:
            raise InvalidParameter("draft_model", f"has {name}={own} where this model needs {wanted}", str(folder))
    inner = content.get("eagle_config")
    settings = {**content, **(inner if isinstance(inner, Mapping) else {})}
    for name, wanted in (("use_aux_hidden_state", True), ("norm_before_fc", False), ("parallel_drafting", False)):
        if bool(settings.get(name, wanted)) != wanted:
            raise UnsupportedModel(f"draft_model: {folder} has {name}={settings[name]}, a form that is not read")
    if model.embedding_scale != 1.0 or model.positions or model.embedding_norm or model.embedding_width:
        raise UnsupportedModel("draft_model: this model's embeddings are changed before its first layer, which a head "
                               "of the EAGLE-3 form does not know")  # fmt: skip


def _taps(content: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers of the model before which the head reads its stream. vLLM counts them so; SGLang and SpecForge, whose
    field is in `eagle_config`, name the layers that come before."""
    inner, found = content.get("eagle_config"), content.get(_IDS) or (2, layers // 2, layers - 3)
    if not content.get(_IDS) and isinstance(inner, Mapping) and isinstance(inner.get(_IDS), list):
        found = [each + 1 if isinstance(each, int) else each for each in inner[_IDS]]
    numbers = isinstance(found, (list, tuple)) and all(type(each) is int and 0 <= each <= layers for each in found)
    if not numbers or len(set(found)) != len(found):
        limit = f"has {_IDS}={shorten(str(found), 80)}, which must be distinct numbers from 0 to {layers}"
        raise InvalidParameter("draft_model", limit, None)
    return tuple(sorted(found))
