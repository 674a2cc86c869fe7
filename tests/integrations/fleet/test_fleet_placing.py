"""Placement of replicas on nodes that Ray describes, without Ray: test_fleet_on_ray.py has a real one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from asyncengine import EngineConfig, FleetError, InvalidParameter, ModelNotFound
from asyncengine.demo import MODEL_PATH
from asyncengine.execution.models.memory.needs import read_needs
from asyncengine.integrations.fleet import FleetConfig, ray_cluster
from asyncengine.integrations.fleet.placing import (
    DEVICE_MEMORY,
    RayNode,
    place_replica,
    place_stages,
    read_claim,
    read_claims,
    read_devices,
    removal_scores,
    try_read_claims,
)
from asyncengine.integrations.fleet.processes import unpack
from asyncengine.integrations.fleet.ray_cluster import RayCluster
from asyncengine.integrations.placement import Claim, Instance, Placement, Refusal, Share

GIB = 2**30


def ray_node(id: str, free: dict[str, float] | None = None, **labels: str) -> RayNode:
    total = {"CPU": 4.0, "GPU": 2.0, "memory": 8.0 * GIB}
    named = {name.replace("__", "/").replace("_", "-"): value for name, value in labels.items()}
    node = RayNode(id, "10.0.0.1", named, total, {**total, **(free or {})})
    return replace(node, devices=node.device_memory() or ())


def placed(
    known: list[RayNode], settings: FleetConfig, *, memory: int = GIB, ours: list[Instance] | None = None,
    lost: dict[str, int] | None = None, ranks: int = 1, copied: int = 0,
) -> Placement | Refusal:  # fmt: skip
    claim = read_claim("some/model", EngineConfig(tensor_parallel=ranks), settings.replace(replica_memory=memory))
    if copied:
        claim = claim.replace(device_bytes=memory - (ranks - 1) * copied, copied_bytes=copied)
    return place_replica(claim, known, ours or [], lost or {}, settings)


def in_turn(known: list[RayNode], settings: FleetConfig, count: int, **changes: Any) -> list[tuple[str, list[int]]]:
    """Node and devices of replicas placed one after the other. Ray tells of none of them yet."""
    ours: list[Instance] = []
    for number in range(count):
        found = placed(known, settings, ours=ours, **changes)
        assert isinstance(found, Placement), str(found)
        ours.append(found.instance(f"fleet/{number}"))
    return [(one.shares[0].node, [index for index, _ in one.shares[0].devices]) for one in ours]


@pytest.mark.parametrize(
    ("placement", "where", "first"),
    [("spread", "aab", {"a"}), ("spread", "abbb", {"b"}), ("binpack", "aaab", {"b"}), ("spread", "abc", {"gone"})],
)
def test_replicas_go_from_where_they_are_least_wanted(placement: str, where: str, first: set[str]) -> None:
    """Removal follows GPUStack's rule, with what nodes have as Ray tells it; replicas on lost nodes go first of all."""
    settings, ours = FleetConfig(placement=placement), []  # type: ignore[arg-type]
    for number, node in enumerate(where):
        found = placed([ray_node(node)], settings, ours=[one for one in ours if one.shares[0].node == node])
        assert isinstance(found, Placement)
        ours.append(found.instance(f"fleet/{number}"))
    known = [ray_node(node) for node in "ab"]
    scores = removal_scores(known, ours, settings)
    nodes = {one.name: one.shares[0].node if one.name in scores else "gone" for one in ours}
    least = min(scores.get(name, 0.0) for name in nodes)
    assert {node for name, node in nodes.items() if scores.get(name, 0.0) == least} == first
    assert removal_scores(known, [], settings) == {}


def test_ranks_of_a_replica_share_a_node_and_no_gpu() -> None:
    """A replica takes as many cores and GPUs as it has ranks, all of one node, each GPU with a shard."""
    known = [ray_node("a", **{DEVICE_MEMORY: "24GiB"}), ray_node("b", **{DEVICE_MEMORY: "80GiB"})]
    assert in_turn(known, FleetConfig(num_cpus=2), 2, ranks=2) == [("a", []), ("b", [])]
    with pytest.raises(AssertionError, match="2 with fewer than 4 free CPUs"):
        in_turn(known, FleetConfig(num_cpus=2), 3, ranks=2)
    whole = FleetConfig(num_gpus=1)
    assert in_turn(known, whole, 2, memory=40 * GIB, ranks=2) == [("a", [0, 1]), ("b", [0, 1])]
    assert in_turn(known, whole, 1, memory=50 * GIB, ranks=2) == [("b", [0, 1])], "a shard of 25 GiB"
    assert in_turn(known, whole, 1, memory=160 * GIB, ranks=2, copied=20 * GIB) == [("b", [0, 1])]
    too_much = placed(known, whole, memory=160 * GIB + 2, ranks=2, copied=20 * GIB)
    assert str(too_much).endswith("a claim of 140.00 GiB on devices would have fitted")  # with one copy of the 20
    told = [known[0], ray_node("b", {"GPU": 1.0}, **{DEVICE_MEMORY: "80GiB"})]  # another program has one
    assert isinstance(placed(told, whole, memory=50 * GIB, ranks=2), Refusal)
    one = placed(known, whole, memory=50 * GIB, ranks=2)
    assert isinstance(one, Placement)
    told = [known[0], ray_node("b", {"GPU": 0.0, "CPU": 2.0}, **{DEVICE_MEMORY: "80GiB"})]  # its own are no other's
    ours = [one.instance("fleet/0")]
    assert removal_scores(told, ours, whole).keys() == {"fleet/0"}


def test_a_label_that_is_not_understood_is_named() -> None:
    with pytest.raises(FleetError, match="asyncengine/device-memory"):
        ray_node("a", **{DEVICE_MEMORY: "plenty"}).device_memory()


def test_a_claim_is_what_the_checkpoint_needs() -> None:
    config = EngineConfig(kv_cache_memory="32MiB")
    needs = read_needs(str(MODEL_PATH), config)
    total = needs.total(32 * 2**20 // needs.kv_bytes_per_token)
    claim = read_claim("demo", config, FleetConfig(num_cpus=0.5, labels={"zone": "x"}))
    assert claim == Claim(model="demo", cpu_bytes=total, cpus=0.5, labels={"zone": "x"})
    on_gpu = read_claim("demo", config, FleetConfig(num_gpus=0.5))
    assert (on_gpu.device_bytes, on_gpu.cpu_bytes, on_gpu.devices, on_gpu.utilization) == (
        claim.cpu_bytes,
        None,
        1,
        0.5,
    )
    assert read_claim("not/here", config, FleetConfig(replica_memory="20GiB")).cpu_bytes == 20 * GIB
    ranks = config.replace(tensor_parallel=2)
    two = read_claim("demo", ranks, FleetConfig(num_cpus=0.5))
    assert (two.cpu_bytes, two.cpus) == (total + needs.step_bytes, 1.0), "each computes steps, the rest is divided"
    shards = read_claim("demo", ranks, FleetConfig(num_gpus=1))
    assert (shards.device_bytes, shards.copied_bytes, shards.devices) == (total, needs.step_bytes, 2)
    assert 2 * shards.per_device(2) == pytest.approx(two.cpu_bytes, abs=2)
    with pytest.raises(InvalidParameter, match="num_gpus: must be 0 or 1 for replicas of several ranks"):
        read_claim("demo", ranks, FleetConfig(num_gpus=0.5))
    stages = config.replace(pipeline_parallel=3)
    three = read_claim("demo", stages, FleetConfig(num_cpus=0.5))
    assert (three.cpu_bytes, three.cpus) == (total, 1.5)
    with pytest.raises(InvalidParameter, match="num_gpus: must be 0 with pipeline_parallel, which is for CPUs"):
        read_claim("demo", stages, FleetConfig(num_gpus=1))


def test_a_node_answers_with_a_claim_or_with_what_was_raised() -> None:
    settings = FleetConfig()
    assert unpack(try_read_claims("demo", EngineConfig(), settings)) == [read_claim("demo", EngineConfig(), settings)]
    with pytest.raises(ModelNotFound):
        unpack(try_read_claims("/no/such/model", EngineConfig(), settings))
    assert pickle.loads(pickle.dumps(read_devices)) is read_devices  # by name: the node has the same program


class AskedRay:
    """Ray that runs tasks here, and keeps what was asked of which node."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, answers: Callable[..., Any] | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._answers = answers
        self.util = SimpleNamespace(list_named_actors=lambda all_namespaces: [])

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="")

    def remote(self, work: Callable[..., Any]) -> Any:
        def options(**options: Any) -> Any:
            self.asked.append(options)
            return SimpleNamespace(remote=self._answers or work)

        return SimpleNamespace(options=options)

    def get(self, answer: Any, timeout: float) -> Any:
        return answer() if callable(answer) else answer

    def wait(self, answers: list[Any], num_returns: int, timeout: float) -> None:
        assert num_returns == len(answers)


def cluster_on(ray: AskedRay, settings: FleetConfig) -> RayCluster:
    """A cluster that is connected to `ray`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_cluster, "load_ray", lambda: ray)
        return RayCluster(settings, "fleet")


def test_files_that_are_not_here_are_read_on_a_node() -> None:
    ray = AskedRay()
    cluster = cluster_on(ray, FleetConfig(labels={"zone": "x"}))
    cluster.prepare("demo", EngineConfig())
    assert not ray.asked
    with pytest.raises(ModelNotFound):
        cluster.prepare("nobody/nothing", EngineConfig())
    assert ray.asked == [{"num_cpus": 0, "label_selector": {"zone": "x"}}]


def test_gpus_that_no_label_tells_of_are_asked_for_once() -> None:
    def none() -> Any:
        raise RuntimeError("its node is gone")

    answers = iter([(5 * GIB, 5 * GIB), none, (GIB, GIB)])
    ray = AskedRay(lambda: next(answers))
    cluster = cluster_on(ray, FleetConfig(num_gpus=1))
    known = [ray_node("a"), ray_node("b", **{DEVICE_MEMORY: "24GiB"}), ray_node("c")]
    assert [node.devices for node in cluster.with_devices(known)] == [(5 * GIB, 5 * GIB), (24 * GIB, 24 * GIB), ()]
    assert cluster.with_devices(known)[2].devices == (GIB, GIB)  # it is asked again, the others are not
    assert [options["label_selector"]["ray.io/node-id"] for options in ray.asked] == ["a", "c", "c"]
    assert cluster_on(ray, FleetConfig()).with_devices(known) == known


def test_a_bundle_has_what_all_ranks_of_a_replica_take() -> None:
    bundles: list[Any] = []

    def placement_group(wanted: list[dict[str, float]], **options: Any) -> Any:
        bundles.append((wanted, options))
        return SimpleNamespace(wait=lambda seconds: True)

    ray: Any = AskedRay()
    ray.util.placement_group = placement_group
    cluster = cluster_on(ray, FleetConfig(num_gpus=1, num_cpus=0.5))
    cluster.reserve(Share(node="a", devices={0: GIB, 1: GIB}, cpus=1.0))
    cluster.reserve(Share(node="b", host_bytes=GIB, cpus=1.0))
    (first, options), (second, _) = bundles
    assert (first, second) == ([{"CPU": 1.0, "GPU": 2.0}], [{"CPU": 1.0, "memory": GIB}])
    assert options == {"strategy": "STRICT_PACK", "bundle_label_selector": [{"ray.io/node-id": "a"}]}
    cluster.reserve(*(Share(node=node, host_bytes=GIB, cpus=2.0) for node in "ab"))  # a stage on each
    wanted, options = bundles[-1]
    assert wanted == [{"CPU": 2.0, "memory": GIB}] * 2
    where = [{"ray.io/node-id": "a"}, {"ray.io/node-id": "b"}]
    assert options == {"strategy": "STRICT_SPREAD", "bundle_label_selector": where}


def test_stages_have_a_node_each_where_one_has_no_room_for_all() -> None:
    """Beside replicas that have their parts of several nodes, or had them of one that is gone."""
    settings = FleetConfig(num_cpus=1, replica_memory="9GiB")
    config = EngineConfig(pipeline_parallel=3)
    whole, stage = read_claims("some/model", config, settings)
    assert (whole.cpu_bytes, whole.cpus) == (9 * GIB, 3)
    assert (stage.cpu_bytes, stage.cpus) == (3 * GIB, 1)
    known = [ray_node(name, {"CPU": 2, "memory": 5 * GIB}) for name in "abcd"]
    assert isinstance(place_replica(whole, known, [], {}, settings), Refusal)
    first = place_stages(stage, 3, known, [], {"a": 1}, settings)
    assert isinstance(first, Placement)
    assert [share.node for share in first.shares] == ["b", "c", "d"]
    taken = {"b": 1, "c": 1, "d": 1}
    left = [
        ray_node(name, {"CPU": 2 - taken.get(name, 0), "memory": (5 - 3 * taken.get(name, 0)) * GIB}) for name in "abcd"
    ]
    second = place_stages(stage, 3, left, [first.instance("one")], {}, settings)
    assert isinstance(second, Refusal)  # the memory of three nodes is taken
    assert "3 with too little free host memory" in str(second)
    gone = place_stages(stage, 1, left[:2], [first.instance("one")], {}, settings)
    assert isinstance(gone, Placement)
    assert [share.node for share in gone.shares] == ["a"]


def test_a_node_on_which_others_were_quicker_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's account of its nodes is a moment old."""
    cluster = cluster_on(AskedRay(), FleetConfig())
    cluster.prepare("demo", EngineConfig())
    tried: list[str] = []
    monkeypatch.setattr(cluster, "nodes", lambda: [ray_node("a"), ray_node("b"), ray_node("c", {"CPU": 0})])
    monkeypatch.setattr(cluster, "reserve", lambda *shares: tried.extend(share.node for share in shares))
    with pytest.raises(FleetError, match=r"1 nodes: 1 with fewer than 1 free CPUs; 2 were taken by others meanwhile$"):
        cluster.spawn()
    assert tried == ["a", "b"]
