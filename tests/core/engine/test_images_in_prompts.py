"""Pictures as plain data: ids that are their content."""

from __future__ import annotations

from asyncengine.images import ImageSpan, PromptImage, with_identity, without_identity


def image(digest: bytes, tokens: int, grid: tuple[int, int] | None = None) -> PromptImage:
    return PromptImage(digest, tokens, 4 * tokens, dict, grid)


def test_no_two_pictures_share_an_id() -> None:
    """Digests that differ in their first or last bit only, or in how index and digest could run into each other."""
    zero, one = bytes(16), bytes(15) + b"\x01"
    digests = [
        zero,
        one,
        b"\x80" + bytes(15),
        b"\xff" * 16,
        bytes(11) + b"\x01" + bytes(4),
        bytes(12) + b"\x01" + bytes(3),
    ]
    spans = [ImageSpan(image(digest, 5000), 0, 5000) for digest in digests]
    ids = [token for span in spans for token in span.ids()]
    assert len(set(ids)) == len(ids) == 30_000
    assert max(ids) < 0
    again = ImageSpan(image(bytes(15) + b"\x01", 5000), 7, 3, 2)
    assert again.ids() == spans[1].ids()[2:5]


def test_the_prompt_comes_back_with_placeholders() -> None:
    spans = (ImageSpan(image(b"a" * 16, 5), 2, 3, 0, 9), ImageSpan(image(b"a" * 16, 5), 6, 2, 3, 9))
    prompt = (1, 2, 9, 9, 9, 3, 9, 9, 4)
    named = with_identity(prompt, spans)
    assert [token for token in named if token >= 0] == [1, 2, 3, 4]
    assert len(set(named)) == 9
    assert without_identity(named, spans) == prompt
