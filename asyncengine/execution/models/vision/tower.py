"""Encoding of pictures: the inputs of a vision tower, and the tower, which consists of transformers' modules.

The image processor is transformers', too, in the variant that needs Pillow alone: the same pixels wherever it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.layers.step import Encoded
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.formats import CheckpointSource
from asyncengine.execution.models.loading import LoadedModel, quiet_transformers
from asyncengine.execution.models.multimodal import TextSource, text_source
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.vision.families import VISION, VisionFamily
from asyncengine.images import DIGEST_BYTES, PromptImage

if TYPE_CHECKING:
    from PIL.Image import Image

# From a picture to the inputs of its model's tower, and to the picture's identity.

_KNOWN = 4096
"""Pictures whose placeholder texts are cached: a repeated one is processed only if its pixels are needed."""


_PROCESSORS: WeakValueDictionary[bytes, ImageProcessor] = WeakValueDictionary()
"""Processors of this process's models, by their settings."""


class _Pixels:
    """Deferred arguments of the tower for a picture. Pickled for another process, it holds the picture alone, of which
    that process's image processor for the same model makes the arguments."""

    def __init__(self, settings: bytes, image: Image, made: Mapping[str, Any] | None = None) -> None:
        self._settings, self._image, self._made = settings, image, made

    def __call__(self) -> Mapping[str, Any]:
        return self._made or _PROCESSORS[self._settings].process(self._image)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pixels, (self._settings, self._image)


class ImageProcessor:
    """Makes `PromptImage`s for one model. All methods may be called from any thread. Can be pickled."""

    def __init__(
        self, config: Any, source: Path | Mapping[str, Any], vocabulary: Mapping[str, int], token_bytes: int
    ) -> None:
        """`config`: transformers' config of the multimodal model. `source`: the folder with preprocessor_config.json,
        or its content. `vocabulary`: {token text: id}. `token_bytes`: bytes of a picture's hidden states per token.

        Raises `OSError`, `ValueError` or `ImportError` if the folder has no image processor that can be used here.
        """
        self._config = config
        self._token_bytes = token_bytes
        self._processor: Any = (self.family.processor or _transformers_processor)(source)
        self._options = self.family.processing(config)
        self.block = self.family.block(config, self._processor)
        """Most tokens of a picture that attend to each other in both directions; 0 if its attention is causal."""
        self._texts = {token: name for name, token in vocabulary.items()}
        self.token: int = _id_of(config, "image_token_id")
        self.placeholder = self._text_of("image_token_id")
        """The text of the token that stands for one hidden state of a picture."""
        self.marker = self._text_of(self.family.marker)
        """The text that a chat template writes for a picture."""
        settings = (type(self._processor).__name__, self._processor.to_json_string(), repr(self._options))
        self._settings = "\0".join(settings).encode()
        self._known: OrderedDict[bytes, tuple[str, tuple[int, int] | None]] = OrderedDict()
        _PROCESSORS[self._settings] = self

    @property
    def family(self) -> VisionFamily:
        """The `VisionFamily` of the model."""
        return VISION[self._config.model_type]

    def prepare(self, image: Image) -> tuple[PromptImage, str]:
        """The picture (RGB), and the text that stands for it in a prompt."""
        size = f"\0{image.width} {image.height}\0".encode()  # the same bytes in another shape are another picture
        hashed = hashlib.blake2b(self._settings + size, digest_size=DIGEST_BYTES)
        hashed.update(image.tobytes())
        digest = hashed.digest()
        known = self._known.get(digest)
        inputs: Mapping[str, Any] | None = None
        if known is None:
            made = self._made(image)
            grid = None if self.family.grid is None else self.family.grid(made, self._config)
            known = self.family.placed(made, self._config, self._text_of), grid
            inputs = self.process(image, made)
        text, grid = self._known[digest] = known
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        count = text.count(self.placeholder)
        pixels = _Pixels(self._settings, image, inputs)
        return PromptImage(digest, count, count * self._token_bytes, pixels, grid), text

    def process(self, image: Image, made: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Arguments of the tower for a picture (RGB), by name. `made`: the processor's output, if there is one yet."""
        made = made or self._made(image)
        return {name: made[name] for name in ("pixel_values", *self.family.inputs)}

    def _made(self, image: Image) -> Mapping[str, Any]:
        return self._processor(images=[image], return_tensors="np", **self._options)

    def _text_of(self, field: str) -> str:
        return self._texts[_id_of(self._config, field)]


def _transformers_processor(source: Path | Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    if isinstance(source, Path):
        return AutoImageProcessor.from_pretrained(str(source), backend="pil", local_files_only=True)
    with TemporaryDirectory() as folder:  # `AutoImageProcessor` reads settings from folders only
        Path(folder, "preprocessor_config.json").write_text(json.dumps(dict(source)))
        return _transformers_processor(Path(folder))


def _id_of(config: Any, field: str) -> int:
    """The token id at a field of config.json, "NAME_id" or "NAME_index". Raises `ValueError` if there is none."""
    token_id = getattr(config, field, None)
    if token_id is None:
        token_id = getattr(config, field.replace("_id", "_index"), None)
    if not isinstance(token_id, int):
        raise ValueError(f"config.json names no {field}")
    return token_id


_SMALL = {
    "num_hidden_layers": 1, "vocab_size": 16, "intermediate_size": 8, "pad_token_id": None, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "enable_moe_block": False,
}  # fmt: skip
"""Sizes of the language model that transformers' class creates beside the tower, and which is dropped afterwards."""
_LANGUAGE = ("language_model", "text_model", "lm_head")


class TransformersTower:
    """Vision tower and projector of a multimodal model: transformers' model without its language model. It encodes one
    picture at a time, so that the result does not depend on others."""

    def __init__(self, module: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._module, self._dtype, self._device = module, dtype, device
        self.nbytes = sum(each.nbytes for each in module.parameters())
        """Bytes of its weights."""

    def encode(self, pixels: Mapping[str, Any]) -> Encoded:
        """Hidden states of one picture. `pixels`: the tower's arguments by name (pixels, grids, masks, sizes). The
        returned tensors are not written to later."""
        arguments = {name: torch.as_tensor(each).to(self._device) for name, each in pixels.items()}
        output = self._module.get_image_features(**arguments, return_dict=True)
        return Encoded(
            self._joined(output.pooler_output),
            tuple(self._joined(each) for each in getattr(output, "deepstack_features", None) or ()),
        )

    def _joined(self, maps: Any) -> torch.Tensor:
        """Concatenate the feature maps of one picture to [n, width]. A copy, as the modules may reuse their buffers."""
        joined = maps if isinstance(maps, torch.Tensor) else torch.cat([each.flatten(0, -2) for each in maps])
        return joined.flatten(0, -2).to(self._dtype, copy=True)


def load_tower(
    source: TextSource, config: Any, dtype: torch.dtype, device: torch.device, *, random: bool = False
) -> TransformersTower:
    """The tower of transformers' `config`, which is modified, with the tensors of the checkpoint that are not the
    language model's. `random`: with random weights.

    Raises `ModelNotFound` naming a missing tensor, `UnsupportedModel` for a quantized one.
    """
    from transformers import AutoModelForImageTextToText

    text = config.get_text_config()
    for field, value in _SMALL.items():
        if hasattr(text, field):
            setattr(text, field, value)
    # an audio tower would be created, too, and take memory
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    model_class = AutoModelForImageTextToText._model_mapping[type(config)]
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if random:
        module = model_class._from_config(config, **options)
    else:
        with quiet_transformers():  # it would warn of the language model's missing tensors
            module, info = model_class.from_pretrained(
                None, config=config, state_dict=_tensors(source), output_loading_info=True,
                ignore_mismatched_sizes=True, **options,
            )  # fmt: skip
        wrong = (*info["missing_keys"], *(each[0] for each in info["mismatched_keys"]))
        bad = sorted(name for name in wrong if not any(f"{language}." in f"{name}." for language in _LANGUAGE))
        if bad:
            raise ModelNotFound(f"{source.folder} lacks the vision tower's tensor {bad[0]}, or has it in a wrong shape")
    inner = module.model
    for name in ("language_model", "text_model"):
        if hasattr(inner, name):
            delattr(inner, name)
    return TransformersTower(inner.eval().requires_grad_(False).to(device), dtype, device)


def _tensors(source: TextSource) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name in source.of_vision():
        tensor = source.whole.read(name)
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedModel(f"{name} of the vision tower is quantized")
        tensors[name] = tensor.clone()
        source.whole.release(tensor)
    return tensors


def read_tower(
    checkpoint: CheckpointSource, loaded: LoadedModel, vocabulary: Callable[[], Mapping[str, int]] | None,
    progress: LoadProgress, *, dummy: bool, attention_backend: str, max_num_batched_tokens: int,
) -> tuple[TransformersTower, ImageProcessor, bool]:  # fmt: skip
    """(tower of a `loaded` model, its image processor, whether positions have three axes). `checkpoint`: the model's
    files. `vocabulary`: gives {token text: id}; None if there is no chat template. `dummy`: weights are random.
    `attention_backend` and `max_num_batched_tokens`: the engine's settings, which may rule pictures out.

    Raises `ModelNotFound` for missing tensors, `UnsupportedModel` (or an error of transformers) for a model that cannot
    read pictures here.
    """
    model, family = loaded.model, VISION.get(loaded.hf_config.model_type)
    if family is None:
        raise UnsupportedModel(f"pictures of family {loaded.hf_config.model_type!r} are not written down")
    if not isinstance(model, Decoder):
        raise UnsupportedModel("its language model runs through transformers' modules")
    if vocabulary is None:
        raise UnsupportedModel("it has no chat template, which says where a picture goes")
    if find_spec("PIL") is None:
        raise UnsupportedModel("Pillow is not installed: install asyncengine[vision]")
    axes = any(rotary.axes for rotary in model.config.rotary)
    if family.grid is not None and not axes:
        raise UnsupportedModel("its positions of pictures are not written down")
    from transformers import AutoConfig

    progress.stage("loading the vision tower")
    settings = getattr(checkpoint, "image_processor", None)
    if settings is not None:
        whole = AutoConfig.for_model(**checkpoint.config)
    else:
        whole = AutoConfig.from_pretrained(str(loaded.folder), local_files_only=True)
    if model.inputs is not None and whole.get_text_config().pad_token_id != 0:
        raise UnsupportedModel("vectors of padding stand for its pictures, and padding is not token 0")
    deep = len(getattr(whole.vision_config, "deepstack_visual_indexes", None) or ())
    if deep >= len(model.layers):
        raise UnsupportedModel(f"its tower has features for {deep} layers, and there are {len(model.layers)}")
    token_bytes = model.config.width * loaded.dtype.itemsize * (1 + deep)
    processor = ImageProcessor(whole, settings or loaded.folder, vocabulary(), token_bytes)
    if count := processor.block:
        window = min((spec.window for spec in model.specs if spec.window is not None), default=count)
        if count > window:
            raise UnsupportedModel(f"a picture's {count} tokens are more than a window of {window}")
        if count > max_num_batched_tokens:
            raise UnsupportedModel(f"a picture's {count} tokens do not fit into max_num_batched_tokens")
        if model.device.type != "cpu" and attention_backend != "torch":
            reason = 'its pictures are attended to both ways, which needs attention_backend="torch" here'
            raise UnsupportedModel(reason)
    text = text_source(checkpoint, model.config)
    tower = load_tower(text, whole, loaded.dtype, loaded.device, random=dummy)
    return tower, processor, axes and family.grid is not None
