"""One budget among several models."""

from __future__ import annotations

import random

import pytest

from asyncengine.errors import InvalidParameter
from asyncengine.execution.models.memory.needs import MemoryClaim, share_memory

MIB = 2**20


def test_who_needs_little_has_it_and_the_others_share_the_rest() -> None:
    claims = [
        MemoryClaim("chat", fixed=100, kv=(10, 1000)),
        MemoryClaim("embed", fixed=50),
        MemoryClaim("small", fixed=20, kv=(4, 10), states=(1, 5)),
        MemoryClaim("other", fixed=30, kv=(10, 10_000)),
    ]
    assert share_memory(200 + 25 + 10 + 400, claims) == [210, 0, 15, 210]
    assert share_memory(1_000_000, claims) == [1000, 0, 15, 10_000]
    assert share_memory(225, claims) == [10, 0, 5, 10]


def test_a_budget_that_holds_no_request_names_what_would() -> None:
    claims = [MemoryClaim("chat", fixed=3 * MIB, kv=(2 * MIB, 9 * MIB)), MemoryClaim("embed", fixed=MIB)]
    with pytest.raises(InvalidParameter, match=r"memory.*at least 6 MiB.*chat 5 MiB, embed 1 MiB"):
        share_memory(6 * MIB - 1, claims)
    assert share_memory(6 * MIB, claims) == [2 * MIB, 0]


def test_states_and_pages_grow_alike() -> None:
    claim = MemoryClaim("hybrid", 7, kv=(10, 110), states=(20, 320))
    assert claim.settings(claim.least) == {"kv_cache_memory": 10, "state_memory": 20}
    assert claim.settings(claim.least + 40) == {"kv_cache_memory": 20, "state_memory": 50}
    assert claim.settings(claim.most) == {"kv_cache_memory": 110, "state_memory": 320}
    assert MemoryClaim("encoder", 7).settings(0) == {}


def test_shares_are_max_min_fair() -> None:
    """No share is below its least or above its most, the budget holds, and who has more than another could not give
    it: that other has all it can use, or as much beyond its least."""
    rng = random.Random(7)
    for _ in range(500):
        claims = []
        for index in range(rng.randint(1, 6)):
            least = rng.randint(0, 50)
            most = rng.choice([least, least + rng.randint(0, 400)])
            claims.append(MemoryClaim(str(index), rng.randint(0, 100), (least, most)))
        needed = sum(claim.fixed + claim.least for claim in claims)
        budget = needed + rng.randint(0, 1000)
        shares = share_memory(budget, claims)
        assert sum(shares) + sum(claim.fixed for claim in claims) <= budget
        assert all(claim.least <= share <= claim.most for claim, share in zip(claims, shares, strict=True))
        grown = [share - claim.least for claim, share in zip(claims, shares, strict=True)]
        hungry = [grown[i] for i, claim in enumerate(claims) if shares[i] < claim.most]
        if hungry:
            assert max(grown) - min(hungry) <= len(claims)  # of a division's rest
            assert budget - sum(shares) - sum(claim.fixed for claim in claims) <= len(claims)
