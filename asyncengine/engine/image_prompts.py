"""Prompts with pictures: a chat's text with the pictures' own texts in it, tokenized, and where each picture lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from asyncengine.config import ImageSettings
from asyncengine.errors import InvalidParameter, shorten
from asyncengine.images import ImageSpan, PromptImage
from asyncengine.text.media import ImageLimits, ImagePart, ImageParts, read_image
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageProcessor(Protocol):
    """The part of a model's files that says what its prompts hold for a picture (`models.vision.processing`)."""

    marker: str
    placeholder: str
    token: int
    block: int

    def prepare(self, image: Image) -> tuple[PromptImage, str]:
        """The picture, and the text that stands for it in a prompt."""


class ImagePrompts:
    """Makes prompts of chats with pictures, for one model. All methods may be called from any thread."""

    def __init__(self, processor: ImageProcessor, tokenizer: TextTokenizer, settings: ImageSettings) -> None:
        self._processor = processor
        self._tokenizer = tokenizer
        self._limits = ImageLimits(
            settings.max_images, settings.max_image_bytes, settings.max_image_pixels, settings.max_image_side
        )

    def parts(self) -> ImageParts:
        """A collector of the pictures of one chat."""
        return ImageParts(self._limits)

    def encode(
        self, text: str, parts: Sequence[ImagePart], encode: Callable[[str], list[int]] | None = None
    ) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Token ids of a rendered chat, with placeholders where its pictures are. Decodes and processes these: takes
        long. `encode`: makes the ids of the text; None: the tokenizer. Raises `InvalidParameter`."""
        marker = self._processor.marker
        pieces = text.split(marker)
        if len(pieces) - 1 != len(parts):
            limit = f"hold {len(parts)} pictures, and {marker!r} stands in the rendered chat {len(pieces) - 1} times"
            raise InvalidParameter("messages", limit)
        images: list[PromptImage] = []
        chat = pieces[:1]
        for part, following in zip(parts, pieces[1:], strict=True):
            decoded = read_image(part, self._limits)
            try:
                image, image_text = self._processor.prepare(decoded)
            except Exception as error:  # image processors refuse what they like (Qwen: 200 times as long as wide)
                reason = shorten(str(error), 200)
                raise InvalidParameter(part.name, f"cannot be processed for this model: {reason}") from error
            images.append(image)
            chat += [image_text, following]
        encode = encode or partial(self._tokenizer.encode, add_special_tokens=False)
        ids = encode("".join(chat))
        return ids, self._spans(ids, images)

    def _spans(self, ids: Sequence[int], images: Sequence[PromptImage]) -> tuple[ImageSpan, ...]:
        """Positions of `images`, in order: runs of placeholders, several for a picture with text between its rows."""
        token, whole = self._processor.token, self._processor.block > 0
        placeholders = [position for position, token_id in enumerate(ids) if token_id == token]
        if len(placeholders) != sum(image.tokens for image in images):
            limit = f"hold {self._processor.placeholder!r} as text, which stands for pictures in this model's prompts"
            raise InvalidParameter("messages", limit)
        spans: list[ImageSpan] = []
        taken = 0
        for image in images:
            positions = placeholders[taken : taken + image.tokens]
            taken += image.tokens
            for _, group in groupby(enumerate(positions), lambda item: item[1] - item[0]):
                run = list(group)
                offset, first = run[0]
                spans.append(ImageSpan(image, first, len(run), offset, token, whole))
        return tuple(spans)
