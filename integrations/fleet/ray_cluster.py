"""The processes of a fleet in a Ray cluster, which host its replicas. The only file that imports Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from asyncengine.config import EngineConfig
from asyncengine.demo import resolve_model
from asyncengine.errors import FleetError, InvalidParameter
from asyncengine.integrations.fleet import placing
from asyncengine.integrations.fleet.connection import UNSENT, Connection, new_context
from asyncengine.integrations.fleet.processes import Cluster, Process, unpack
from asyncengine.integrations.fleet.replica import Replica
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.fleet.stages import StageActor
from asyncengine.integrations.placement import Claim, Instance, Refusal, Share

logger = logging.getLogger("asyncengine")

NAMESPACE = "asyncengine"
"""Namespace of the actors' names in a Ray cluster."""
REACH_SECONDS = 5.0
"""Seconds until a head's machine must have answered."""
RESERVE_SECONDS = 3.0
"""Seconds until a node must have reserved what a replica needs."""
DEVICE_SECONDS = 60.0
"""Seconds until a node must have answered with the memory of its GPUs: it imports torch."""
MAX_CALLS = 10_000
"""Concurrent calls of one replica; none of them waits for another."""
CLOSE_SECONDS = 10.0
"""Seconds that Ray gets to end something."""


def load_ray() -> Any:
    """Import the package. Raises `FleetError` where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise FleetError('a fleet needs the package ray: pip install "asyncengine[cluster]"') from error
    return ray


class RayCluster(Cluster["ReplicaProcess"]):
    """A Ray cluster, and the processes that one fleet has there. Blocking calls; any thread."""

    def __init__(self, config: FleetConfig, name: str) -> None:
        """Connect. Raises `FleetError` for a head that does not answer, and `InvalidParameter` for a name that another
        fleet has and for `replicas="numa"`."""
        if not isinstance(config.replicas, int):
            raise InvalidParameter(
                "replicas", "must be a number with Ray, which knows no memory nodes", config.replicas
            )
        super().__init__(config, name)
        self._ray = load_ray()
        self.replicas = config.replicas
        self._owns_ray = not self._ray.is_initialized()
        self._lost_on: dict[str, int] = {}
        """Replicas lost on each node, by its id."""
        self._claims: list[Claim] = []
        self._stages = 1
        self._devices: dict[str, tuple[int, ...]] = {}
        """Memory in bytes of each GPU of the nodes that were asked, by node id."""
        if self._owns_ray:
            self._connect()
        self._context = new_context()
        if self._context is None:
            logger.warning("pyzmq is missing: Ray carries all between a fleet and its replicas, which takes longer")
        try:
            self._head = self._ray.get_runtime_context().gcs_address
            self._check_name()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        address = str(self.config.address or os.environ.get("RAY_ADDRESS"))
        bare = address.removeprefix("ray://")
        try:
            if bare.rpartition(":")[2].isdigit():  # not "auto"
                _reach(bare)  # Ray itself tries for minutes
        except OSError as error:
            raise FleetError(f"no Ray head answers at {address}: {error}") from error
        try:
            self._ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise FleetError(f"no Ray at {address}: {error}") from error

    def _check_name(self) -> None:
        actors = self._ray.util.list_named_actors(all_namespaces=True)
        if any(item["namespace"] == NAMESPACE and item["name"].startswith(f"{self.name}/") for item in actors):
            raise InvalidParameter("name", "another fleet has it", self.name)

    def head_answers(self) -> bool:
        with contextlib.suppress(OSError):
            _reach(str(self._head))
            return True
        return False

    # ---------------------------------------------------------------- processes

    def prepare(self, model: str, config: EngineConfig) -> None:
        """Read a replica's claim from the model's files: here if they are on this machine, else on a node."""
        self._stages = config.pipeline_parallel
        if self.config.replica_memory is not None or os.path.exists(resolve_model(model)):
            self._claims = placing.read_claims(model, config, self.config)
            return
        ask = self._ray.remote(placing.try_read_claims).options(
            num_cpus=0, label_selector=dict(self.config.labels) or None
        )
        try:
            answer = self._ray.get(ask.remote(model, config, self.config), timeout=self.config.start_timeout)
        except self._ray.exceptions.RayError as error:
            raise FleetError(f"no node tells what {model} takes: {_first_line(error)}") from error
        self._claims = unpack(answer)

    def spawn(self) -> ReplicaProcess:
        """Start a process for a replica on the nodes that `place` chooses. Nothing is loaded there yet.

        Raises `FleetError` if no node has room for a replica; its text counts the nodes by what they lack.
        """
        name = f"{self.name}/{next(self._serial)}"
        assert self._claims, "prepare() comes first"
        full: list[str] = []  # nodes on which other programs were quicker
        while True:
            nodes_by_id = {node.id: node for node in self.nodes() if node.id not in full}
            with self._lock:
                ours, lost = [process.placed for process in self._processes.values()], dict(self._lost_on)
            placement = placing.place_replica(self._claims[0], list(nodes_by_id.values()), ours, lost, self.config)
            if isinstance(placement, Refusal) and self._stages > 1:
                nodes_left = list(nodes_by_id.values())
                placement = placing.place_stages(self._claims[-1], self._stages, nodes_left, ours, lost, self.config)
            if isinstance(placement, Refusal):
                note = f"; {len(full)} were taken by others meanwhile" if full else ""
                raise FleetError(f"no room for a replica ({self._wanted()}): {placement}{note}")
            nodes = [nodes_by_id[share.node] for share in placement.shares]
            group = self.reserve(*placement.shares)
            if group is not None:
                placed = placement.instance(name)
                process = ReplicaProcess(self._ray, self.config, nodes, group, placed, self._context)
                with self._lock:
                    self._processes[name] = process
                return process
            full += [node.id for node in nodes]

    def removal_scores(self) -> dict[str, float]:
        nodes = self.nodes()
        with self._lock:
            ours = [process.placed for process in self._processes.values()]
        return placing.removal_scores(nodes, ours, self.config)

    def nodes(self) -> list[placing.RayNode]:
        """Nodes that are alive, as Ray describes them now. Raises `FleetError` where its head does not answer."""
        from ray._private import state  # no public API tells the free resources of each node

        try:
            nodes, free = self._ray.nodes(), state.available_resources_per_node()
        except Exception as error:
            raise FleetError(f"the Ray head does not answer: {error}") from error
        return self.with_devices([
            placing.RayNode(
                node["NodeID"], node["NodeManagerAddress"], node.get("Labels") or {}, node["Resources"],
                free.get(node["NodeID"], {}),
            )
            for node in nodes
            if node["Alive"]
        ])  # fmt: skip

    def with_devices(self, nodes: list[placing.RayNode]) -> list[placing.RayNode]:
        """The nodes with the memory of their GPUs: from the node's label, else read once on the node."""
        if not self.config.num_gpus:
            return nodes
        labelled = {node.id: node.device_memory() for node in nodes}
        ask = self._ray.remote(placing.read_devices)
        answers = {
            node_id: ask.options(num_cpus=0, label_selector={"ray.io/node-id": node_id}).remote()
            for node_id, memory in labelled.items()
            if memory is None and node_id not in self._devices
        }
        if answers:
            self._ray.wait(list(answers.values()), num_returns=len(answers), timeout=DEVICE_SECONDS)
        for node_id, answer in answers.items():
            with contextlib.suppress(self._ray.exceptions.RayError):  # no answer: nothing is placed there
                self._devices[node_id] = self._ray.get(answer, timeout=0)
        return [replace(node, devices=labelled[node.id] or self._devices.get(node.id, ())) for node in nodes]

    def _wanted(self) -> str:
        config, claim = self.config, self._claims[0]
        labels = f", labels {dict(config.labels)}" if config.labels else ""
        gpus = claim.devices or 0
        memory = (claim.cpu_bytes or claim.per_device(gpus) * gpus) / 2**30
        spread = f", or a node for each of {self._stages} stages" if self._stages > 1 else ""
        return f"{claim.cpus:g} CPUs, {config.num_gpus * gpus:g} GPUs, {memory:.2f} GiB{labels}{spread}"

    def reserve(self, *shares: Share) -> Any | None:
        """A placement group with a bundle for each share, for all ranks of a replica on that node; None if another
        program has reserved it meanwhile."""
        gpus = self.config.num_gpus
        needs = [{"CPU": share.cpus, "GPU": gpus * len(share.devices), "memory": share.host_bytes} for share in shares]
        bundles = [{name: amount for name, amount in need.items() if amount} for need in needs]
        where = [{"ray.io/node-id": share.node} for share in shares]
        strategy = "STRICT_PACK" if len(shares) == 1 else "STRICT_SPREAD"
        group = self._ray.util.placement_group(bundles, strategy=strategy, bundle_label_selector=where)
        if group.wait(RESERVE_SECONDS):
            return group
        self._ray.util.remove_placement_group(group)
        return None

    def end(self, process: ReplicaProcess, *, lost: bool = False) -> None:
        if lost:  # its node is avoided from now on
            with self._lock:
                self._lost_on[process.node] = self._lost_on.get(process.node, 0) + 1
        super().end(process)

    def close(self) -> None:
        super().close()
        with self._lock:
            owned, self._owns_ray = self._owns_ray, False  # the connection, where the fleet has made it
        if owned:
            _try_for(CLOSE_SECONDS, self._ray.shutdown)
        if self._context is not None:
            self._context.destroy(linger=0)


class ReplicaProcess(Process):
    """A Ray actor that hosts a `Replica`. Ray sets its number of threads in its environment."""

    def __init__(
        self, ray: Any, config: FleetConfig, nodes: Sequence[placing.RayNode], group: Any, placed: Instance,
        context: Any,
    ) -> None:  # fmt: skip
        """`nodes`: one for each share of `placed`. The first hosts the replica, each of the others a stage."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray, self._group = ray, group
        self.name, self.node, self.placed = placed.name, nodes[0].id, placed
        self.connection = Connection(self, nodes[0].address, config.silence_limit, context)
        self._addresses = [node.address for node in nodes[1:]]
        options_of: list[dict[str, Any]] = [
            {
                "num_cpus": share.cpus, "num_gpus": config.num_gpus * len(share.devices),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
            }
            for number, share in enumerate(placed.shares)
        ]  # fmt: skip
        replica = ray.remote(Replica).options(
            name=self.name, namespace=NAMESPACE, max_concurrency=MAX_CALLS, **options_of[0]
        )
        try:
            self._actor = replica.remote()
            self._stages = [ray.remote(StageActor).options(**options).remote() for options in options_of[1:]]
        except ValueError as error:  # another fleet was quicker
            ray.util.remove_placement_group(group)
            raise InvalidParameter("name", f"another fleet has it ({error})", self.name) from error

    async def settings(self, config: EngineConfig) -> tuple[EngineConfig, bytes]:
        config, _ = await super().settings(config)
        key = os.urandom(32).hex().encode()
        pairs = zip(self._stages, self._addresses, strict=True)
        listening = [actor.listen.remote(address, key).future() for actor, address in pairs]
        try:
            hosts = [await asyncio.wrap_future(future) for future in listening]
        except self._ray.exceptions.RayError as error:
            raise FleetError(f"a stage of replica {self.name} was lost: {_first_line(error)}") from error
        return (config.replace(stage_hosts=hosts), key) if hosts else (config, b"")

    async def ask(self, method: str, arguments: bytes) -> bytes:
        try:
            answer: bytes = await asyncio.wrap_future(self._actor.answer.remote(method, arguments).future())
        except self._ray.exceptions.RayError as error:
            raise FleetError(f"replica {self.name} was lost: {_first_line(error)}") from error
        return answer

    def post_by_ray(self, commands: bytes) -> None:
        """Send commands as a call of Ray's, without waiting; in order."""
        with contextlib.suppress(self._ray.exceptions.RayError):  # a lost replica: reading its updates raises, too
            self._actor.post.remote(commands)

    async def updates_by_ray(self) -> AsyncGenerator[bytes, None]:
        """Updates of the replica, streamed by Ray. Raises `FleetError` when its process or node is gone."""
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": UNSENT}
        try:
            async for item in self._actor.updates.options(**options).remote():
                yield await item
        except self._ray.exceptions.RayError as error:
            raise FleetError(f"replica {self.name} was lost: {_first_line(error)}") from error

    def kill(self) -> None:
        """End the process and remove its placement group. A head that is gone is not waited for."""
        for actor in (self._actor, *self._stages):
            _try_for(CLOSE_SECONDS, partial(self._ray.kill, actor))
        _try_for(CLOSE_SECONDS, lambda: self._ray.util.remove_placement_group(self._group))


def _try_for(seconds: float, work: Callable[[], object]) -> None:
    """Wait at most `seconds` for `work`, on a thread: without a head Ray's calls block for ever. Ignores its errors."""

    def call() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=call, name="asyncengine-ray-call", daemon=True)
    thread.start()
    thread.join(seconds)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _reach(address: str) -> None:
    """Connect to "HOST:PORT", and close that at once. Raises `OSError`."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
