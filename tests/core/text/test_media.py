"""Pictures of messages: what is read, and what is refused before memory is taken for it."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncengine.errors import InvalidParameter
from asyncengine.text.chat_messages import Budget, TemplateForm, check_messages
from asyncengine.text.media import ImageLimits, ImagePart, ImageParts, read_image

LIMITS = ImageLimits(images=4, nbytes=100_000, pixels=40_000, side=300)


def written(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def square(color: str = "red", size: tuple[int, int] = (8, 6)) -> Image.Image:
    return Image.new("RGB", size, color)


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def read(source: Any, limits: ImageLimits = LIMITS) -> Image.Image:
    return read_image(ImagePart("messages[0].content[0].image", source), limits)


def header_of(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, of which it holds none."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (body, b"IDAT")
    packed = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def test_every_source_gives_the_same_pixels(tmp_path: Path) -> None:
    content = written(square())
    file = tmp_path / "red.png"
    file.write_bytes(content)
    percent = "data:image/png," + "".join(f"%{byte:02x}" for byte in content)
    for source in (content, bytearray(content), data_url(content), percent, file, square()):
        image = read(source)
        assert (image.mode, image.size, image.getpixel((3, 3))) == ("RGB", (8, 6), (255, 0, 0))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    assert read(Image.new(mode, (4, 4))).mode == "RGB"


def test_the_callers_picture_is_copied() -> None:
    mine = square("blue")
    image = read(mine)
    mine.paste("green", (0, 0, 8, 6))
    assert image.getpixel((0, 0)) == (0, 0, 255)


def test_orientation_is_applied() -> None:
    image = Image.new("RGB", (8, 4), "white")
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    assert read(written(image, "JPEG", exif=exif)).size == (4, 8)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (header_of(10_000, 2), r"is 10000 x 2 pixels: a side is over max_image_side=300"),
        (header_of(250, 250), r"is 250 x 250 pixels, over max_image_pixels=40000"),
        (header_of(60_000, 60_000), r"over max_image_side=300|more pixels than max_image_pixels"),
        (square("red", (301, 1)), r"a side is over max_image_side=300"),
        (b"x" * 100_001, r"has 100001 bytes, over max_image_bytes=100000"),
        ("data:image/png;base64," + "A" * 140_000, r"bytes, over max_image_bytes=100000"),
        (written(Image.effect_noise((99, 99), 90), "JPEG")[:-3000], r"cannot be decoded: .*truncated"),
        (written(square(), "PNG", save_all=True, append_images=[square("blue")]), r"is an animation"),
        (written(square(), "TIFF"), r"is no picture in one of the formats JPEG, PNG"),
        (b"%PDF-1.4", r"is no picture"),
        ("data:image/png;base64,@@@", r"is not valid base64"),
        ("https://example.org/a.png", r"must be a data URL: this engine fetches nothing.*example.org"),
        ("file:///etc/passwd", r"reads a file only of a Path"),
        (Path("/nowhere/at/all.png"), r"cannot be read: No such file"),
        (17, r"must be a data URL, bytes, a PIL image or a pathlib.Path"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
def test_refusals_name_part_and_limit(source: Any, says: str) -> None:
    with pytest.raises(InvalidParameter, match=rf"messages\[0\]\.content\[0\]\.image.*({says})"):
        read(source)


def test_nothing_is_decoded_before_its_size_is_known() -> None:
    """A file of a few bytes that would become 12 GB, and one that is larger than its limit."""
    endless = Path("/dev/zero")
    bomb = written(square("red", (4000, 4000)))
    Image.init()
    tracemalloc.start()
    for source in (header_of(60_000, 60_000), bomb, endless if endless.exists() else b"x" * 200_000):
        with pytest.raises(InvalidParameter):
            read(source)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def chat(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_parts_are_collected_in_order_and_marked_in_their_places() -> None:
    images = ImageParts(LIMITS)
    parts = (
        {"type": "image_url", "image_url": {"url": "data:,1", "detail": "low"}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": "data:,2"},
        {"type": "image", "image": b"3"},
    )
    checked = check_messages(chat(*parts), TemplateForm(blocks=True), Budget(100, images=images))
    one, text, two, three = checked[0]["content"]
    assert (one, two, three) == ({"type": "image"},) * 3
    assert text == {"type": "text", "text": "and"}
    assert [part.source for part in images.parts] == ["data:,1", "data:,2", b"3"]
    assert images.parts[0].name == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("parts", "form", "images", "says"),
    [
        (({"type": "image", "image": b"1"},) * 5, True, True, r"content\[4\].image: is one picture too.*max_images=4"),
        (({"type": "image"},), True, True, r"content\[0\].image: must be a picture"),
        (({"type": "image_url", "image_url": {}},), True, True, r"content\[0\].image_url.url: must be a picture"),
        (({"type": "image", "image": b"1"},), False, True, r"content\[0\].*chat template reads none"),
        (({"type": "image", "image": b"1"},), True, False, r"content\[0\].type: must be 'text': text is served"),
        (({"type": "video"},), True, True, r"content\[0\].type: must be 'text', 'image_url' or 'image'"),
    ],
)
def test_parts_that_are_refused(parts: Any, form: bool, images: bool, says: str) -> None:
    budget = Budget(1000, images=ImageParts(LIMITS) if images else None)
    with pytest.raises(InvalidParameter, match=says):
        check_messages(chat(*parts), TemplateForm(blocks=form), budget)
