"""The free list notices at once what would otherwise surface as somebody else's wrong tokens."""

import pytest

from asyncengine.errors import InvariantViolation
from asyncengine.kvcache.block_pool import BlockPool


def test_every_page_but_the_padding_page_is_handed_out_once():
    pool = BlockPool(8)
    assert pool.capacity == 7
    assert sorted(pool.take(7)) == list(range(1, 8))
    assert pool.num_free == 0


def test_pages_given_back_are_handed_out_again():
    pool = BlockPool(4)
    pages = pool.take(3)
    pool.give(pages[:2])
    assert sorted(pool.take(2)) == sorted(pages[:2])


def test_double_free_is_refused():
    pool = BlockPool(4)
    (page,) = pool.take(1)
    pool.give([page])
    with pytest.raises(InvariantViolation, match=f"page {page} given back while free"):
        pool.give([page])


def test_freeing_a_page_never_taken_is_refused():
    pool = BlockPool(4)
    with pytest.raises(InvariantViolation, match="while free"):
        pool.give([2])


def test_the_padding_page_cannot_be_given_back():
    pool = BlockPool(4)
    with pytest.raises(InvariantViolation):
        pool.give([0])


def test_taking_more_than_there_is_is_refused_and_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(InvariantViolation, match="asked for 4 pages, 3 free"):
        pool.take(4)
    assert pool.num_free == 3


def test_a_pool_without_a_usable_page_is_refused():
    with pytest.raises(ValueError, match="at least 2 pages"):
        BlockPool(1)
