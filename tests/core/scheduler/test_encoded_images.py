"""Pictures that stay encoded: what goes to make room for another one."""

from __future__ import annotations

from asyncengine import SamplingParams
from asyncengine.images import ImageSpan, PromptImage
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.encoding import EncodedImages
from asyncengine.scheduler.request import Request


def request(number: int) -> Request:
    """A request whose prompt is a picture of four bytes."""
    image = PromptImage(bytes([number]) * 16, 2, 4, dict)
    spec = RequestSpec(number, (5, 5, 6), SamplingParams(), 8, images=(ImageSpan(image, 0, 2, 0, 5),))
    return Request(spec)


def test_only_as_many_go_as_make_room() -> None:
    images = EncodedImages(10, {})
    dropped = []
    for number in (1, 2, 3, 4):
        assert images.fit(request(number), 3) == 3
        encode = images.take()
        assert encode is not None
        dropped.append(encode.dropped)
        assert images.nbytes <= 10
    assert dropped == [(), (), (bytes([1]) * 16,), (bytes([2]) * 16,)]
    assert images.fit(request(3), 3) == 3
    assert images.take() is None, "it is there"


def test_one_that_is_larger_than_all_room_is_there_alone() -> None:
    images = EncodedImages(3, {})
    assert images.fit(request(1), 3) == 3
    assert images.fit(request(2), 3) == 0, "one in a step"
    images.take()
    assert images.fit(request(2), 3) == 3
    encode = images.take()
    assert encode is not None
    assert encode.dropped == (bytes([1]) * 16,)
