"""From a picture to what its model's tower is given, and to its identity.

The image processor is transformers', in the form that needs Pillow alone: the same pixels wherever it runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncengine.execution.models.vision.families import VISION
from asyncengine.images import DIGEST_BYTES, PromptImage

if TYPE_CHECKING:
    from PIL.Image import Image

_KNOWN = 4096
"""Pictures whose sizes are kept: who asks again about one is not made to wait until it has been processed."""


class _Sizes(NamedTuple):
    text: str
    grid: tuple[int, int] | None


class ImageProcessor:
    """Makes `PromptImage`s for one model. All methods may be called from any thread."""

    def __init__(
        self, config: Any, source: Path | Mapping[str, Any], vocabulary: Mapping[str, int], token_bytes: int
    ) -> None:
        """`config`: transformers' of the whole model. `source`: the folder with preprocessor_config.json, or what that
        holds. `vocabulary`: its tokenizer's. `token_bytes`: of a picture's hidden states at one token.

        Raises `OSError`, `ValueError` or `ImportError` where the folder has no image processor that can be used here.
        """
        self.family = VISION[config.model_type]
        self._config = config
        self._token_bytes = token_bytes
        self._processor: Any
        if self.family.processor is not None:
            self._processor = self.family.processor(source)
        else:
            self._processor = _transformers_processor(source)
        self._options = self.family.processing(config)
        self.block = self.family.block(config, self._processor)
        """Most tokens of a picture that attend to each other both ways; 0: none do."""
        self._texts = {token: name for name, token in vocabulary.items()}
        self.token: int = _id_of(config, "image_token_id")
        self.placeholder = self._text_of("image_token_id")
        """The text of the token that stands for one hidden state."""
        self.marker = self._text_of(self.family.marker)
        """The text that a chat template writes for a picture."""
        settings = (type(self._processor).__name__, self._processor.to_json_string(), repr(self._options))
        self._settings = "\0".join(settings).encode()
        self._known: OrderedDict[bytes, _Sizes] = OrderedDict()

    def prepare(self, image: Image) -> tuple[PromptImage, str]:
        """The picture (RGB), and the text that stands for it in a prompt."""
        size = f"\0{image.width} {image.height}\0".encode()  # the same bytes in another shape are another picture
        hashed = hashlib.blake2b(self._settings + size, digest_size=DIGEST_BYTES)
        hashed.update(image.tobytes())
        digest = hashed.digest()
        sizes = self._known.get(digest)
        pixels: Callable[[], Mapping[str, Any]]
        if sizes is None:
            made = self._made(image)
            grid = None if self.family.grid is None else self.family.grid(made, self._config)
            sizes = _Sizes(self.family.placed(made, self._config, self._text_of), grid)
            kept = self._inputs(made)
            pixels = lambda: kept  # noqa: E731
        else:
            pixels = lambda: self._inputs(self._made(image))  # noqa: E731
        self._known[digest] = sizes
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        count = sizes.text.count(self.placeholder)
        return PromptImage(digest, count, count * self._token_bytes, pixels, sizes.grid), sizes.text

    def _made(self, image: Image) -> Mapping[str, Any]:
        return self._processor(images=[image], return_tensors="np", **self._options)

    def _inputs(self, made: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: made[name] for name in ("pixel_values", *self.family.inputs)}

    def _text_of(self, field: str) -> str:
        return self._texts[_id_of(self._config, field)]


def _transformers_processor(source: Path | Mapping[str, Any]) -> Any:
    from transformers import AutoImageProcessor

    if isinstance(source, Path):
        return AutoImageProcessor.from_pretrained(str(source), backend="pil", local_files_only=True)
    with TemporaryDirectory() as folder:  # it finds the class of a name in folders alone
        Path(folder, "preprocessor_config.json").write_text(json.dumps(dict(source)))
        return _transformers_processor(Path(folder))


def _id_of(config: Any, field: str) -> int:
    """The id of a token that config.json names, under either of two names."""
    found = getattr(config, field, None)
    if found is None:
        found = getattr(config, field.replace("_id", "_index"), None)
    if not isinstance(found, int):
        raise ValueError(f"config.json names no {field}")
    return found
