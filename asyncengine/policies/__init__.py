"""Scheduling policies. A new one is a file with a class that inherits from `Policy`, and its place in `POLICIES`."""

import copy
from collections.abc import Collection
from typing import Any, cast

from asyncengine.errors import InvalidParameter
from asyncengine.policies.base import Policy, overrides, victim_rank
from asyncengine.policies.orders import ByPriority, FirstComeFirstServed, LongestPrefixMatch, ShortestRemaining
from asyncengine.policies.weighted_fair import WeightedFair

__all__ = ["POLICIES", "Policy", "WeightedFair", "as_policy", "overrides", "start_policy", "victim_rank"]

_ALL: tuple[type[Policy], ...] = (
    FirstComeFirstServed, ByPriority, LongestPrefixMatch, ShortestRemaining, WeightedFair,
)  # fmt: skip
POLICIES = {policy.name: policy for policy in _ALL}
"""Policies by name, the choices of the setting `policy`."""


def as_policy(name: str, value: Any, choices: Collection[str] = POLICIES) -> str | Policy:
    """One of `choices`, or an object like `Policy`. Raises `InvalidParameter`, naming what it lacks of the protocol."""
    if isinstance(value, str) and value in choices:
        return value
    rule = f"must be one of {', '.join(map(repr, choices))}, or an object like asyncengine.Policy"
    if isinstance(value, str | int | type) or value is None:
        raise InvalidParameter(name, rule, value)
    protocol = [each for each in (*Policy.__annotations__, *vars(Policy)) if not each.startswith("_")]
    if missing := [each for each in protocol if not hasattr(value, each)]:
        raise InvalidParameter(name, f"{rule}; {type(value).__name__} lacks {', '.join(missing)}")
    if type(value).__hash__ is None:
        raise InvalidParameter(name, "must be hashable, as configurations are", value)
    return cast(Policy, value)


def start_policy(value: str | Policy) -> Policy:
    """The policy of one scheduler, its own."""
    return POLICIES[value]() if isinstance(value, str) else copy.deepcopy(value)
