"""GPUStack's placement of a language model on one device or host, transcribed: filters, fit, scores, first of the best.

Plain loops over the plain data, and nothing of `asyncengine.cluster` but that data. What a formula multiplies first is
multiplied first here, so that equal scores are equal to the last bit. Its rules for several devices and nodes differ
from ours on purpose (docs/howto/placement.md).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from asyncengine.integrations.placement import Claim, Instance, Node

Part = tuple[str, list[int], dict[int, int], int]
"""(node, devices in the order chosen, bytes of each, bytes of host memory)"""


@dataclass
class Candidate:
    stage: str
    part: Part
    score: float = 0.0


def filtered(claim: Claim, nodes: list[Node]) -> tuple[list[Node], dict[str, int]]:
    """Nodes with the model's files first, then those that pass every filter; how many fell to which."""
    left = sorted(nodes, key=lambda node: 0 if claim.model in node.files else 1)
    chosen = dict(claim.on)
    fell: dict[str, int] = {}

    def keep(name: str, passes: list[bool]) -> None:
        nonlocal left
        lost = len(left) - sum(passes)
        if lost:
            fell[name] = lost
        left = [node for node, passed in zip(left, passes, strict=True) if passed]

    if claim.cluster is not None:
        keep("cluster", [node.cluster == claim.cluster for node in left])
    if chosen:
        keep("devices", [any(d.index in chosen.get(n.name, ()) for d in n.devices) for n in left])
    keep("labels", [all(dict(node.labels).get(key) == value for key, value in claim.labels) for node in left])
    keep("status", [node.ready for node in left])
    if claim.backend is not None:
        versions = [dict(node.backends).get(claim.backend) for node in left]
        keep("backend", [v is not None and (claim.version is None or claim.version in v) for v in versions])
    if claim.path is not None:
        keep("path", [claim.path in node.paths for node in left])
    return left, fell


class Rules:
    def __init__(self, claim: Claim, nodes: list[Node], instances: list[Instance], strategy: str) -> None:
        self.claim, self.nodes, self.instances, self.strategy = claim, nodes, instances, strategy
        chosen = dict(claim.on)
        self.left, self.fell = filtered(claim, nodes)
        self.devices = {
            node.name: [d for d in node.devices if not chosen or d.index in chosen.get(node.name, ())]
            for node in self.left
        }
        self.free = {node.name: self.allocatable(node) for node in nodes}

    # -------------------------------------------------------- what is free

    def allocatable(self, node: Node) -> tuple[int, dict[int, int]]:
        """(host memory, memory of each device)"""
        ram, vram = 0, defaultdict(int)
        for instance in self.instances:
            for share in instance.shares:
                if share.node == node.name:
                    ram += share.host_bytes
                    for index, taken in share.devices:
                        vram[index] += taken
        left = {d.index: max(d.memory - vram[d.index] - node.device_reserved, 0) for d in node.devices}
        host = max(node.host_memory - ram - node.host_reserved, 0)
        if node.unified:
            host = max(host - node.device_reserved - sum(vram.values()), 0)
            left = {index: min(host, free) for index, free in left.items()}
        return host, left

    # -------------------------------------------------------- fit

    def by_kind(self) -> dict[str, list[tuple[Node, list]]]:
        groups: dict[str, list[tuple[Node, list]]] = {}
        for node in self.left:
            own: dict[str, list] = {}
            for device in self.devices[node.name]:
                own.setdefault(device.kind, []).append(device)
            for kind, devices in own.items():
                groups.setdefault(kind, []).append((node, devices))
        return groups

    def candidates(self) -> list[Candidate]:
        return (self.one_device() if self.claim.device_bytes else []) or self.cpu()

    def one_device(self) -> list[Candidate]:
        found, u = [], self.claim.utilization
        for group in self.by_kind().values():
            for node, devices in group:
                host, free = self.free[node.name]
                if host < self.claim.host_bytes:
                    continue
                for device in devices:
                    if self.claim.device_bytes > device.memory * u or free[device.index] / device.memory < u:
                        continue
                    taken = {device.index: int(device.memory * u)}
                    found.append(Candidate("device", (node.name, [device.index], taken, self.claim.host_bytes)))
        return found

    def cpu(self) -> list[Candidate]:
        if self.claim.cpu_bytes is None:
            return []
        ordered = sorted(self.left, key=lambda node: self.free[node.name][0], reverse=True)
        names = [node.name for node in ordered if self.free[node.name][0] >= self.claim.cpu_bytes]
        return [Candidate("cpu", (name, [], {}, self.claim.cpu_bytes)) for name in names]

    # -------------------------------------------------------- scores

    def binpack(self, part: Part, most: float, *, down: bool = False) -> float:
        node, indexes, taken, ram = part
        host, free = self.free[node]
        if not indexes:
            return ram / (host + ram if down else host) * most if (host + ram if down else host) else 0.0
        best = 0.0
        for index in indexes:
            ram_free = host + ram if down else host
            vram_free = free[index] + taken[index] if down else free[index]
            ram_score = 0 if ram_free == 0 else ram / ram_free * most * 1.0
            vram_score = 0 if vram_free == 0 else taken[index] / vram_free * most * 2.0
            best = max(best, (ram_score + vram_score) / (1.0 + 2.0))
        return best

    def counts(self) -> tuple[dict, dict]:
        """{node: [current, others]}, once for each device of an instance; {(node, device): [current, others]}"""
        totals: dict = defaultdict(lambda: [0, 0])
        on: dict = defaultdict(lambda: [0, 0])
        for instance in self.instances:
            which = 0 if instance.model == self.claim.model else 1
            for share in instance.shares:
                for index, _ in share.devices:
                    on[share.node, index][which] += 1
                    totals[share.node][which] += 1
                if not share.devices:
                    totals[share.node][which] += 1
        return totals, on

    def spread(self, part: Part, among: list[str], most: float) -> float:
        totals, on = self.counts()
        stats = [totals[name] for name in among]
        low, high = min(s[0] for s in stats), max(s[0] for s in stats)
        low_others, high_others = min(s[1] for s in stats), max(s[1] for s in stats)
        current, others = totals[part[0]]
        near, far = inverse(current, low, high), inverse(others, low_others, high_others)
        if any(s[0] == 0 for s in stats):
            score = 0.85 + 0.15 * far if current == 0 else 0.45 + 0.35 * near + 0.20 * far
        else:
            score = 0.50 + 0.25 * near + 0.15 * far
        score = score * most
        if not part[1]:
            return score
        total = 0.0
        for index in part[1]:
            own, beside = on[part[0], index]
            total += 1 / (1 + own + beside * 0.2)
        return score * 0.85 + total / len(part[1]) * most * 0.15

    def locality(self, candidate: Candidate) -> float:
        name = candidate.part[0]
        main = {node.name for node in self.nodes if self.claim.model in node.files}
        draft = {node.name for node in self.nodes if self.claim.draft is not None and self.claim.draft in node.files}
        ratio = float(name in main)
        if draft:
            ratio = (ratio + 0.5 * (name in draft)) / 1.5
        return ratio * 5.0

    def best(self) -> Candidate | None:
        found = self.candidates()
        among = [candidate.part[0] for candidate in found]
        for candidate in found:
            if self.strategy == "spread":
                score = self.spread(candidate.part, among, 100.0)
            else:
                score = self.binpack(candidate.part, 100.0)
            candidate.score = score + self.locality(candidate)
        chosen = found[0] if found else None
        for candidate in found[1:]:
            if candidate.score > chosen.score:
                chosen = candidate
        return chosen

    # -------------------------------------------------------- scale-down

    def order_of_removal(self) -> list[tuple[str, float]]:
        ready = {node.name: node.ready for node in self.nodes}
        scored = []
        for instance in self.instances:
            if instance.model != self.claim.model:
                continue
            (share,) = instance.shares
            part = (share.node, [index for index, _ in share.devices], dict(share.devices), share.host_bytes)
            if not ready[share.node] or instance.state == "failed":
                status = 0.0
            else:
                status = 100.0 if instance.state == "running" else 50.0
            offload = 0.0 if instance.layers is None else instance.layers[0] / instance.layers[1] * 10.0
            if self.strategy == "spread":
                placement = self.spread(part, [node.name for node in self.nodes], 1.0)
            else:
                placement = self.binpack(part, 1.0, down=True)
            scored.append((instance.name, status + offload + placement))
        return sorted(scored, key=lambda pair: pair[1])


def inverse(value: int, low: int, high: int) -> float:
    return 1.0 if high <= low else 1.0 - (value - low) / (high - low)
