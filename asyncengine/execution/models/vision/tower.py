"""A vision tower of transformers' modules, with the weights of a checkpoint whose language model runs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.loading import quiet_transformers
from asyncengine.execution.models.multimodal import TextPart
from asyncengine.execution.models.vision import Encoded

_SMALL = {
    "num_hidden_layers": 1, "vocab_size": 16, "intermediate_size": 8, "pad_token_id": None, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "enable_moe_block": False,
}  # fmt: skip
"""The language model beside the tower in transformers' class, which is made with it, and let go of."""
_LANGUAGE = ("language_model", "text_model", "lm_head")


class TransformersTower:
    """The part of a model that encodes pictures, one at a time, each as if it were alone: a transformers model without
    its language model."""

    def __init__(self, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._module, self._dtype, self._device = module, dtype, device
        self.nbytes = sum(each.nbytes for each in module.parameters())
        """Bytes of its weights."""

    def encode(self, pixels: Mapping[str, Any]) -> Encoded:
        """The picture of these `pixels` (and grids, masks, sizes), by the names of the tower's arguments. The tensors
        are the caller's own."""
        given = {name: torch.as_tensor(each).to(self._device) for name, each in pixels.items()}
        found = self._module.get_image_features(**given, return_dict=True)
        return Encoded(
            self._joined(found.pooler_output),
            tuple(self._joined(each) for each in getattr(found, "deepstack_features", None) or ()),
        )

    def _joined(self, parts: Any) -> torch.Tensor:
        """[n, width] of the parts of one picture, in memory of its own: the modules may write into theirs again."""
        every = parts if isinstance(parts, torch.Tensor) else torch.cat([part.flatten(0, -2) for part in parts])
        return every.flatten(0, -2).to(self._dtype, copy=True)


def load_tower(
    part: TextPart, config: Any, dtype: torch.dtype, device: torch.device, *, random: bool = False
) -> TransformersTower:
    """The tower of transformers' `config`, which is changed, with all tensors of the checkpoint that are not the
    language model's. `random`: made up.

    Raises `ModelNotFound` naming a tensor that is missing, `UnsupportedModel` for quantized ones.
    """
    from transformers import AutoModelForImageTextToText

    text = config.get_text_config()
    for field, value in _SMALL.items():
        if hasattr(text, field):
            setattr(text, field, value)
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    kind = AutoModelForImageTextToText._model_mapping[type(config)]
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if random:
        module = kind._from_config(config, **options)
    else:
        with quiet_transformers():  # it lacks its language model
            module, info = kind.from_pretrained(
                None, config=config, state_dict=_tensors(part), output_loading_info=True, ignore_mismatched_sizes=True,
                **options,
            )  # fmt: skip
        wrong = (*info["missing_keys"], *(each[0] for each in info["mismatched_keys"]))
        bad = sorted(name for name in wrong if not any(f"{own}." in f"{name}." for own in _LANGUAGE))
        if bad:
            raise ModelNotFound(f"{part.folder} lacks the vision tower's tensor {bad[0]}, or has it in a wrong shape")
    inner = module.model
    for name in ("language_model", "text_model"):
        if hasattr(inner, name):
            delattr(inner, name)
    return TransformersTower(inner.eval().requires_grad_(False).to(device), dtype, device)


def _tensors(part: TextPart) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name in part.of_vision():
        tensor = part.whole.read(name)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModel(f"{name} of the vision tower is quantized")
        found[name] = tensor.clone()
        part.whole.release(tensor)
    return found
