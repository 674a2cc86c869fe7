"""The program of ranks 1 .. size - 1 (`ranks`): loads its part of a model, and computes the passes that it is told."""

from __future__ import annotations

import logging
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncengine.execution.attention.factory import make_backend
from asyncengine.execution.device.child import run
from asyncengine.execution.device.collective_gather import BACKENDS, Gather, open_gather
from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.models.description import resolve_device
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.runner.ranks import Order
from asyncengine.execution.runner.stages import StagedRunner, runner_of
from asyncengine.execution.runner.step_inputs import StepInputs
from asyncengine.lora.layers.slots import LoraLayers


def main(
    engine: int, life: int, rank: int, size: int, backend: int, stages: int, orders: int, memory: int, rows: int = -1
) -> None:
    """Serve the process `engine` by sockets and memory of these descriptors (`device.child.run`). `backend`: a place in
    `BACKENDS`. `rows`: in the first rank of a stage on a machine of its own, a connection to rank 0."""
    links = [Connection(rows)] if rows >= 0 else []
    logging.getLogger("asyncengine").setLevel(logging.CRITICAL)  # rank 0 has the same to say

    def work() -> None:
        with torch.inference_mode():
            _serve(Connection(orders), open_gather(memory, rank, size, BACKENDS[backend], stages, links))

    run(work, engine, life)


def _serve(orders: Connection, gather: Gather) -> None:
    _, (order,) = _next(orders)
    device = resolve_device(order.config.device)
    if device.type == "cuda":
        order = order._replace(config=order.config.replace(device=f"cuda:{gather.rank}"))
    with on_device(resolve_device(order.config.device)):
        _compute(orders, gather, order)


def _compute(orders: Connection, gather: Gather, order: Order) -> None:
    """Load the rank's part, and do what is told."""
    torch.set_num_threads(order.config.num_threads or 1)
    cores = Cores(order.config.num_threads, resolve_device(order.config.device))
    try:
        loaded = load_model(
            order.path, order.config, LoadProgress(False), None, None, order.headless, cores.loading, ranks=gather
        )
    except Exception as error:
        orders.send(error)
        raise
    config = order.config
    lora = LoraLayers(loaded.model, config.max_loras, config.max_lora_rank)
    orders.send(loaded.weights_bytes)
    _, (pages, window_pages, states, room) = _next(orders)
    make, memory = runner_of(loaded, config.max_num_batched_tokens, gather, room)
    backend = make_backend(
        config, loaded.layers, pages, loaded.dtype, loaded.device, loaded.max_model_len,
        num_window_pages=window_pages, all_kernels=False, shared=memory,
    )  # fmt: skip
    runner = make(loaded, backend, config.max_num_seqs, lora=lora, cores=cores, num_states=states)
    compiled, device = loaded.model.compiled, loaded.device
    del loaded
    orders.send(None)
    while True:
        kind, content = _next(orders)
        match kind:
            case "forward":
                with cores.step(torch_alone=compiled):
                    runner.forward(StepInputs.unpacked(content[0], device))
            case "end":
                assert isinstance(runner, StagedRunner)
                with cores.step(torch_alone=compiled):
                    runner.end()
            case "adapter":
                lora.write(*content)
            case "update":
                runner.prepare_update(content[0], config, content[1])()
                orders.send(None)
            case "release":
                runner.prepare_release(*content)()
                orders.send(None)


def _next(orders: Connection) -> Any:
    """(kind, content) of the next message."""
    return pickle.loads(orders.recv_bytes())
