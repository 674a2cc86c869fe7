"""Scheduling policies. A new one is a file with a class that inherits from `Policy`, and its place in `POLICIES`."""

import copy

from asyncengine.errors import InvalidParameter
from asyncengine.policies.base import Policy, overrides, victim_rank
from asyncengine.policies.orders import ByPriority, FirstComeFirstServed, LongestPrefixMatch, ShortestRemaining
from asyncengine.policies.weighted_fair import WeightedFair

__all__ = ["POLICIES", "Policy", "WeightedFair", "check_policy", "overrides", "start_policy", "victim_rank"]

_ALL: tuple[type[Policy], ...] = (
    FirstComeFirstServed, ByPriority, LongestPrefixMatch, ShortestRemaining, WeightedFair,
)  # fmt: skip
POLICIES = {policy.name: policy for policy in _ALL}
"""Policies by name, the choices of the setting `policy`."""


def check_policy(value: object) -> None:
    """Raises `InvalidParameter` for what is no policy, naming what it lacks of the protocol."""
    if isinstance(value, str) and value in POLICIES:
        return
    rule = f"must be one of {', '.join(map(repr, POLICIES))}, or an object like asyncengine.Policy"
    if isinstance(value, str | type) or value is None:
        raise InvalidParameter("policy", rule, value)
    protocol = [name for name in (*Policy.__annotations__, *vars(Policy)) if not name.startswith("_")]
    if missing := [name for name in protocol if not hasattr(value, name)]:
        raise InvalidParameter("policy", f"{rule}; {type(value).__name__} lacks {', '.join(missing)}")
    if type(value).__hash__ is None:
        raise InvalidParameter("policy", "must be hashable, as configurations are", value)


def start_policy(value: str | Policy) -> Policy:
    """The policy of one scheduler, its own."""
    return POLICIES[value]() if isinstance(value, str) else copy.deepcopy(value)
