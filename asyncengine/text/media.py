"""Pictures of a chat: content parts are taken apart, looked at while they are still bytes, and decoded within limits.

A part is one of

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}     (OpenAI; the url alone will do)
    {"type": "image", "image": ...}       bytes, a PIL image, a `pathlib.Path`, or a str like the url above

Text from a network can name no file of this machine: a path must be a `Path`, which JSON does not have. Nor can it make
this machine send requests: a URL is refused.

Nothing is decoded before its size is known: the number of bytes, then what the file's header says of its sides and
frames.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from asyncengine.errors import InvalidParameter, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

PARTS = ("image_url", "image")
"""Types of content parts that are pictures."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Pillow's names of the formats that are decoded; its decoders of all others are never run."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the pictures of one request."""

    images: int = 16
    nbytes: int = 20 * 2**20
    """Bytes of a picture's file."""
    pixels: int = 2**25
    side: int = 8192
    """Pixels of its width and of its height."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture as a message has it."""

    name: str
    """The part that holds it, for errors: "messages[0].content[1]"."""
    source: Any


class ImageParts:
    """Pictures of one chat in the order in which its messages hold them, collected while these are checked."""

    def __init__(self, limits: ImageLimits) -> None:
        self.limits = limits
        self.parts: list[ImagePart] = []

    def add(self, name: str, part: Mapping[str, Any]) -> None:
        """Take the picture out of a content part. Raises `InvalidParameter` for one that holds none, or for one too
        many."""
        type_ = part["type"]
        name, source = f"{name}.{type_}", part.get(type_)
        if isinstance(source, Mapping):
            name, source = f"{name}.url", source.get("url")
        if source is None or source == "":
            raise InvalidParameter(name, "must be a picture: a data URL, bytes, a PIL image or a pathlib.Path", source)
        if len(self.parts) == self.limits.images:
            raise InvalidParameter(name, f"is one picture too many: a request may have max_images={len(self.parts)}")
        self.parts.append(ImagePart(name, source))


def read_image(part: ImagePart, limits: ImageLimits) -> Image:
    """The picture as RGB, turned the way its EXIF orientation says, in memory of its own.

    Raises `InvalidParameter` naming the part, and the limit that it is over.
    """
    name, source = part.name, part.source
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InvalidParameter(name, "needs Pillow: install asyncengine[vision]") from None
    try:
        if isinstance(source, Image.Image):
            image = source
        else:
            image = Image.open(io.BytesIO(_bytes_of(name, source, limits)), formats=FORMATS)
        _check_size(name, image, limits)
        # these two decode; a file that ends too early, or lies about itself, is found out here
        return ImageOps.exif_transpose(image).convert("RGB")
    except InvalidParameter:
        raise
    except UnidentifiedImageError:
        raise InvalidParameter(name, f"is no picture in one of the formats {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # Pillow has a limit of its own
        raise InvalidParameter(name, f"has more pixels than max_image_pixels={limits.pixels}") from None
    except Exception as error:  # decoders raise what they like for broken files, and this is about one file only
        raise InvalidParameter(name, f"cannot be decoded: {shorten(str(error), 200)}") from error


def _check_size(name: str, image: Image, limits: ImageLimits) -> None:
    width, height = image.size
    if not width or not height:
        raise InvalidParameter(name, f"has no pixels: {width} x {height}")
    if max(width, height) > limits.side:
        raise InvalidParameter(name, f"is {width} x {height} pixels: a side is over max_image_side={limits.side}")
    if width * height > limits.pixels:
        raise InvalidParameter(name, f"is {width} x {height} pixels, over max_image_pixels={limits.pixels}")
    # telephones write several pictures into one JPEG (MPO), of which the first is the one that was taken
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise InvalidParameter(name, "is an animation: pass one of its frames")


def _bytes_of(name: str, source: object, limits: ImageLimits) -> bytes:
    if isinstance(source, (bytes, bytearray, memoryview)):
        _check_bytes(name, len(source), limits)
        return bytes(source)
    if isinstance(source, os.PathLike):
        return _file(name, Path(source), limits)
    if not isinstance(source, str):
        raise InvalidParameter(name, "must be a data URL, bytes, a PIL image or a pathlib.Path", type(source).__name__)
    if source[:5].lower() == "data:":
        return _data_url(name, source, limits)
    limit = "must be a data URL: this engine fetches nothing over the network, and reads a file only of a Path"
    raise InvalidParameter(name, limit, shorten(source, 80))


def _check_bytes(name: str, count: int, limits: ImageLimits) -> None:
    if count > limits.nbytes:
        raise InvalidParameter(name, f"has {count} bytes, over max_image_bytes={limits.nbytes}")


def _file(name: str, path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limits.nbytes + 1)  # whatever the file system says its size is
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidParameter(name, f"cannot be read: {shorten(str(reason), 200)}", str(path)) from error
    _check_bytes(name, len(content), limits)
    return content


def _data_url(name: str, url: str, limits: ImageLimits) -> bytes:
    """The content of a data URL (RFC 2397)."""
    head, comma, content = url.partition(",")
    if not comma:
        raise InvalidParameter(name, "must be a data URL like data:image/png;base64,...", shorten(url, 80))
    if not head.lower().endswith(";base64"):
        _check_bytes(name, len(content) // 3, limits)  # each byte may take three characters
        data = unquote_to_bytes(content)
    else:
        _check_bytes(name, len(content) // 4 * 3 - 2, limits)
        try:
            data = base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidParameter(name, f"is not valid base64: {error}", shorten(url, 80)) from None
    _check_bytes(name, len(data), limits)
    return data
