"""The program of ranks 1 .. size - 1 (`ranks`): it loads its shard of a model, and runs the commands of rank 0."""

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
    """Serve the process `engine` by sockets and memory of these descriptors (`device.child.run`). `backend`: an index
    into `BACKENDS`. `rows`: a connection to rank 0, for the first rank of a stage on another machine; else -1."""
    links = [Connection(rows)] if rows >= 0 else []
    logging.getLogger("asyncengine").setLevel(logging.CRITICAL)  # rank 0 logs the same messages

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
    """Load the rank's shard, and run commands until rank 0 is gone."""
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
        command, arguments = _next(orders)
        match command:
            case "forward":
                with cores.step(torch_alone=compiled):
                    runner.forward(StepInputs.unpacked(arguments[0], device))
            case "end":
                assert isinstance(runner, StagedRunner)
                with cores.step(torch_alone=compiled):
                    runner.end()
            case "adapter":
                lora.write(*arguments)
            case "update":
                runner.prepare_update(arguments[0], config, arguments[1])()
                orders.send(None)
            case "release":
                runner.prepare_release(*arguments)()
                orders.send(None)


def _next(orders: Connection) -> Any:
    """(command, arguments) of the next message (`Ranks.send`)."""
    return pickle.loads(orders.recv_bytes())
