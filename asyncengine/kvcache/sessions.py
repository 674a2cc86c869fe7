"""The branches of sessions in the prefix cache: which pages a session will want again, and when.

A session is a conversation, or an agent's work, of many requests; where each of them ended is the *tip* of a branch.
Pages under no tip, of no request that runs, and of none outside of sessions are those of a branch that was superseded:
they go first, as do those of a closed session. (A time to live alone keeps them as long as the pages still needed;
SGLang's RFC 24656 found that branches must lose their rank as soon as they are superseded.)
"""

from __future__ import annotations

from asyncengine.kvcache.radix_tree import Branches, Node, RadixTree

MOST_TIPS = 64
"""Branches of one session, at most; the oldest is given up then."""


def continue_branch(tree: RadixTree, branches: Branches, node: Node) -> None:
    """Note that a request of the session starts behind `node`, the last page that the tree knows of its prompt.

    Of branches that it goes on from, other samples are superseded. One that goes on from none supersedes those that it
    parts from last: an edited message, thoughts that a template drops, a summary. Where there are several, they may be
    parallel and have no more in common than a system prompt: then only those that it shares at least half of. A prompt
    known beyond all tips is that of a branch which was given up too early, and supersedes none.
    """
    step: Node | None = node
    while step is not None and step.owner is not branches:
        step.owner = branches
        step = step.parent
    common = {tip: _common_depth(tip, node) for tip in branches.tips}
    continued = [tip for tip, depth in common.items() if depth == tip.depth]  # they stay until there is a later one
    if continued:
        groups = {branches.tips[tip] for tip in continued} - {None}
        superseded = [tip for tip in common if tip not in continued and branches.tips[tip] in groups]
    else:
        most, alone = max(common.values(), default=0), len(common) == 1
        near = [tip for tip, depth in common.items() if depth == most and (alone or 2 * depth >= tip.depth)]
        superseded = near if most and node.depth == most else []
    for tip in superseded:
        give_up(tree, branches, tip)


def end_branch(tree: RadixTree, branches: Branches, node: Node, group: int | None) -> None:
    """Note that a request of the session has ended behind `node`; `group`: of the samples that it is one of."""
    if node.parent is None or branches.closed:
        return
    for tip in [tip for tip in branches.tips if _common_depth(tip, node) == tip.depth]:
        _leave(branches, tip)  # it goes on to here
    if len(branches.tips) == MOST_TIPS:
        give_up(tree, branches, next(iter(branches.tips)))
    branches.tips[node] = group
    node.tips += (branches,)


def give_up(tree: RadixTree, branches: Branches, tip: Node) -> None:
    """The session will not want the branch up to `tip` again."""
    _leave(branches, tip)
    tree.pass_unclaimed(tip)


def close_branches(tree: RadixTree, branches: Branches) -> None:
    """The session has ended: all that only it wanted goes first."""
    branches.closed = True
    for tip in list(branches.tips):
        give_up(tree, branches, tip)


def _leave(branches: Branches, tip: Node) -> None:
    branches.tips.pop(tip, None)
    tip.tips = tuple(owner for owner in tip.tips if owner is not branches)


def _common_depth(one: Node, other: Node) -> int:
    """The depth up to which two paths are one; 0 in two namespaces."""
    while one is not other and one.parent is not None:
        if one.depth >= other.depth:
            one = one.parent
        else:
            other = other.parent  # type: ignore[assignment]  # only a root has none, and it is not the deeper one
    return one.depth
