"""Loading what reads pictures beside a language model: its vision tower and its image processor."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from asyncengine.config import EngineConfig
from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.errors import UnsupportedModel
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.execution.models.decoder import Decoder
    from asyncengine.execution.models.formats import CheckpointSource
    from asyncengine.execution.models.loading import LoadedModel
    from asyncengine.execution.models.progress import LoadProgress
    from asyncengine.execution.runner.step_inputs import ImageStore

logger = logging.getLogger("asyncengine")


class LoadedImages(NamedTuple):
    """The parts that read pictures, or why there are none."""

    store: ImageStore | None = None
    prompts: ImagePrompts | None = None
    why_none: str | None = None


NO_IMAGES = LoadedImages(why_none="the model writes no text")


def load_images(
    checkpoint: CheckpointSource, loaded: LoadedModel, tokenizer: TextTokenizer | None, config: EngineConfig,
    progress: LoadProgress,
) -> LoadedImages:  # fmt: skip
    """The vision tower of the `loaded` model, whose files are `checkpoint`.

    What is in the way of pictures is not in the way of text: it is logged, and `info.no_images` says it. Raises
    `ModelNotFound` for a tower whose tensors are missing.
    """
    from asyncengine.execution.models.families import MULTIMODAL
    from asyncengine.execution.models.formats import first_line

    family = getattr(loaded.hf_config, "model_type", "")
    if family not in MULTIMODAL:
        of_two_files = ": a GGUF file has pictures in another one (mmproj)" if checkpoint.metadata else ""
        return LoadedImages(why_none=f"the model reads text alone{of_two_files}")
    if config.images == "off":
        return LoadedImages(why_none='images="off"')
    try:
        return _load(checkpoint, loaded, tokenizer, config, progress)
    except (UnsupportedModel, ImportError, OSError, ValueError, KeyError) as error:
        reason = first_line(error)
    logger.warning("%s reads text alone: %s", loaded.name, reason)
    return LoadedImages(why_none=reason)


def _load(
    checkpoint: CheckpointSource, loaded: LoadedModel, tokenizer: TextTokenizer | None, config: EngineConfig,
    progress: LoadProgress,
) -> LoadedImages:  # fmt: skip
    from asyncengine.execution.models.decoder import Decoder
    from asyncengine.execution.models.vision.families import VISION

    model, family = loaded.model, VISION.get(loaded.hf_config.model_type)
    if family is None:
        raise UnsupportedModel(f"pictures of family {loaded.hf_config.model_type!r} are not written down")
    if not isinstance(model, Decoder):
        raise UnsupportedModel("its language model runs through transformers' modules")
    if tokenizer is None or not tokenizer.has_chat_template:
        raise UnsupportedModel("it has no chat template, which says where a picture goes")
    if find_spec("PIL") is None:
        raise UnsupportedModel("Pillow is not installed: install asyncengine[vision]")
    axes = any(rotary.axes for rotary in model.config.rotary)
    if family.grid is not None and not axes:
        raise UnsupportedModel("its positions of pictures are not written down")
    from transformers import AutoConfig

    from asyncengine.execution.models.multimodal import text_part
    from asyncengine.execution.models.vision.tower import ImageProcessor, load_tower
    from asyncengine.execution.runner.step_inputs import ImageStore

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
    processor = ImageProcessor(whole, settings or loaded.folder, tokenizer.get_vocab(), token_bytes)
    if processor.block:
        _check_two_way(model, processor.block, loaded, config)
    part = text_part(checkpoint, model.config)
    tower = load_tower(part, whole, loaded.dtype, loaded.device, random=config.load_format == "dummy")
    loaded.weights_bytes += tower.nbytes
    loaded.left_out = ()
    store = ImageStore(tower, axes and family.grid is not None, loaded.device, near=family.near)
    return LoadedImages(store, ImagePrompts(processor, tokenizer, config))


def _check_two_way(model: Decoder, count: int, loaded: LoadedModel, config: EngineConfig) -> None:
    """Refuse what cannot let the `count` tokens of a picture attend to each other both ways."""
    windows = [spec.window for spec in model.specs if spec.window is not None]
    if count > min(windows, default=count):
        raise UnsupportedModel(f"a picture's {count} tokens are more than a window of {min(windows)}")
    if count > config.max_num_batched_tokens:
        raise UnsupportedModel(f"a picture's {count} tokens do not fit into max_num_batched_tokens")
    if loaded.device.type != "cpu" and config.attention_backend != "torch":
        raise UnsupportedModel('its pictures are attended to both ways, which needs attention_backend="torch" here')
