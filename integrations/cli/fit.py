"""`asyncengine fit`: the memory that a model takes, and whether it fits on this machine. No weights are loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Column, Table

from asyncengine.checks import as_integer
from asyncengine.config import EngineConfig, ModelSettings
from asyncengine.integrations.cli.exits import FAILED
from asyncengine.integrations.cli.loading import on_thread
from asyncengine.integrations.cli.options import engine_config
from asyncengine.integrations.cli.text import write, write_json
from asyncengine.integrations.placement import Claim, Cluster, Device, Node, Placement, place
from asyncengine.integrations.placement.nodes import MAX_MEMORY, claim_of, on_each, size

if TYPE_CHECKING:
    from asyncengine.execution.models.memory.needs import ModelNeeds

_KERNELS = 72 * 2**20
"""Bytes of compiled kernels, of the library that runs them, and of the other parts that a command does not import."""
_OF_A_TOKEN = 1200
"""Bytes of a token of the vocabulary, in tokenizer, tables and grammars. Both figures: docs/howto/first_start.md."""


class Machine(NamedTuple):
    """Free memory of this machine now, in bytes."""

    host_free: int
    devices_free: tuple[int, ...] = ()
    """Free bytes of each CUDA device, by index."""
    process: int = 0
    """Bytes that a process with an engine takes besides its model's: Python, libraries, kernels, tokenizer."""


def run(args: argparse.Namespace) -> int:
    config = engine_config(args, show_progress=not args.json)
    if args.kv_tokens is not None:
        as_integer("kv_tokens", args.kv_tokens, 1)
    needs, machine = on_thread(lambda: _read(args.model, config)).result()
    tokens = needs.kv_tokens(config.kv_cache_memory) if args.kv_tokens is None else args.kv_tokens
    machines = 1 + len(config.stage_hosts)
    processes = machine.process * config.processes // machines
    claim, total = claim_here(needs, tokens, config, processes), needs.total(tokens) + processes * machines
    free = [(index, min(count, MAX_MEMORY)) for index, count in enumerate(machine.devices_free) if count]
    devices = tuple(Device(index=index, memory=count) for index, count in free)
    node = Node(name="this machine", host_memory=min(machine.host_free, MAX_MEMORY), devices=devices)
    outcome = place(claim, Cluster([node]))
    on = where(outcome) if isinstance(outcome, Placement) else None
    if args.json:
        sizes = {"process_bytes": machine.process, "kv_tokens": tokens, "total_bytes": total, "claim": asdict(claim)}
        sizes |= {"machines": machines}
        verdict = {"fits": on is not None, "on": on, "why_not": str(outcome) if on is None else None}
        write_json({**asdict(needs), **sizes, "machine": machine._asdict(), **verdict})
    else:
        _show(needs, tokens, total, claim, machine, machines)
        instead = ': pass device="cpu"' if on == "cpu" and machine.devices_free else ""  # else it would take a device
        write(f"It does not fit here: {outcome}.\n" if on is None else f"It fits on {on}{instead}.\n")
    return FAILED if on is None else 0


def _read(model: str, config: EngineConfig) -> tuple[ModelNeeds, Machine]:
    """The needs of the model and the memory of this machine. Imports torch, which takes a second."""
    import psutil
    import torch

    from asyncengine.demo import resolve_model
    from asyncengine.execution.device.memory import free_bytes
    from asyncengine.execution.models.memory.needs import read_needs

    needs = read_needs(resolve_model(model), config)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    free = tuple(free_bytes(torch.device("cuda", index)) for index in range(count))
    process = psutil.Process().memory_info().rss + _KERNELS + needs.vocab_size * _OF_A_TOKEN
    machine = Machine(free_bytes(torch.device("cpu")), free, process)
    return (replace(needs, name=model) if model == "demo" else needs), machine


def claim_here(needs: ModelNeeds, tokens: int, config: ModelSettings, processes: int = 0) -> Claim:
    """The claim of one engine on this machine, which runs on a device for each rank or on the host's processors. If
    other machines have stages of it, each has the same claim. `processes`: bytes of its processes on one machine."""
    ranks = config.tensor_parallel
    copied = needs.step_bytes // ranks if ranks > 1 else 0
    device = "cpu" if config.pipeline_parallel > 1 else config.device  # stages compute on processors alone
    memory = on_each(1 + len(config.stage_hosts), needs.total(tokens), needs.step_bytes)
    claim = claim_of(needs.name, memory, ranks, copied, device)
    on_host = None if claim.cpu_bytes is None else claim.cpu_bytes + processes
    return replace(claim, cpu_bytes=on_host, host_bytes=0 if claim.device_bytes is None else processes)


def where(placement: Placement) -> str:
    if placement.stage == "cpu":
        return "cpu"
    return " and ".join(f"cuda:{index}" for share in placement.shares for index, *_ in share.devices)


def _show(needs: ModelNeeds, tokens: int, total: int, claim: Claim, machine: Machine, machines: int) -> None:
    columns = Column(), Column(justify="right"), Column(style="dim")
    table = Table(*columns, title=f"{needs.name} ({needs.dtype})", title_justify="left", show_header=False)
    table.add_row("weights", size(needs.weight_bytes), "")
    note = f"{tokens} tokens of {size(needs.kv_bytes_per_token)}; the model reads {needs.max_model_len}"
    table.add_row("KV cache", size(needs.kv_bytes(tokens)), note)
    if needs.kv_bytes(tokens) < tokens * needs.kv_bytes_per_token:
        table.add_row("", "", "of layers with windows, those in sight")
    if needs.num_states:
        many = f"{needs.num_states} of {size(needs.state_bytes)}: running requests and snapshots"
        table.add_row("recurrent states", size(needs.num_states * needs.state_bytes), many)
    if needs.image_bytes:
        table.add_row("pictures", size(needs.image_bytes), "encoded ones that are kept, at most")
    table.add_row("a step", size(needs.step_bytes), "about, beside these")
    note = "Python, libraries, kernels, tokenizer; on the host, in each process of a model, partly shared"
    table.add_row("the process", size(machine.process), note)
    table.add_row("together", size(total), "", style="bold", end_section=True)
    if machines > 1:
        note = f"about, of {machines}: this one and those of stage_hosts"
        table.add_row("each machine", size(claim.cpu_bytes or 0), note, style="bold", end_section=True)
    if claim.device_bytes is not None:
        for index, free in enumerate(machine.devices_free):
            table.add_row(f"cuda:{index}", size(free), "free now")
    if claim.cpu_bytes is not None:
        table.add_row("cpu", size(machine.host_free), "free now")
    Console(width=100).print(table)
