"""Placement on one device or host, and its undoing, compared with GPUStack's rules, which `gpustack_rules` transcribes.

The differences that docs/howto/placement.md lists cannot show in these cases; `test_placement` has tests of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.long import TIMES

from asyncengine.integrations.placement import Cluster, Placement, Refusal, place, rank_for_removal

from .gpustack_rules import Rules
from .random_clusters import random_case

CASES = 1200 * TIMES
"""Number of random clusters, of which about two thirds are compared."""


def test_random_clusters_are_filled_as_gpustack_fills_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        case = random_case(seed, utilization=True, single=True)
        claim = replace(case.claim, devices=None if case.claim.device_bytes is None else 1)
        rules = Rules(claim, case.nodes, case.instances, case.strategy)
        hosts = {rules.free[node.name][0] for node in rules.left}
        if claim.host_bytes and any(node.unified for node in rules.left):
            continue
        if case.strategy == "spread" and claim.cpu_bytes is not None and len(hosts) > 1:
            continue  # GPUStack takes the host with most free memory
        expected = rules.best()
        found = place(claim, case.nodes, instances=case.instances, strategy=case.strategy)
        if expected is None:
            assert isinstance(found, Refusal), seed
            assert [(reason.what, reason.nodes) for reason in found.reasons[: len(rules.fell)]] == [*rules.fell.items()]
            seen["refused"] += 1
            continue
        assert isinstance(found, Placement), (seed, expected, str(found))
        (share,), (node, indices, taken, host) = found.shares, expected.part
        assert (found.stage, share.node, share.host_bytes) == (expected.stage, node, host), seed
        assert share.devices == tuple((index, taken[index]) for index in indices), seed
        assert found.score == pytest.approx(expected.score, rel=1e-12), seed
        seen[found.stage] += 1
    assert min(seen[stage] for stage in ("device", "cpu", "refused")) >= CASES // 20, seen


def test_instances_are_given_up_in_gpustacks_order() -> None:
    many = 0
    for seed in range(CASES // 3):
        case = random_case(seed, utilization=True, single=True)
        expected = Rules(case.claim, case.nodes, case.instances, case.strategy).order_of_removal()
        ranked = rank_for_removal(Cluster(case.nodes, case.instances), case.claim.model, strategy=case.strategy)
        assert [each.instance.name for each in ranked] == [name for name, _ in expected], seed
        assert [each.score for each in ranked] == pytest.approx([score for _, score in expected], rel=1e-12), seed
        many += len(expected) > 1
    assert many > CASES // 50
