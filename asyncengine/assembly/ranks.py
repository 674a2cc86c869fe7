"""Tensor and pipeline parallelism as they are wired: the other ranks of a model, started before it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter

if TYPE_CHECKING:
    import torch

    from asyncengine.execution.models.loading import LoadedModel
    from asyncengine.execution.runner.ranks import Ranks
    from asyncengine.pooling_spec import PoolingSpec


_ON_CPU = ""
"""The carrier between processes of a CPU, of `device.collective_gather.BACKENDS`; tests have gloo stand in for NCCL."""


def start_ranks(
    config: EngineConfig, device: torch.device, pooling: PoolingSpec | None, undo: ExitStack
) -> tuple[Ranks | None, EngineConfig]:
    """The other ranks of a model, which `undo` ends, and the settings of each: its share of the threads. None where the
    model is computed by one process.

    Raises `InvalidParameter` where it cannot be computed by several.
    """
    size, setting, staged = config.processes, config.parallel_field, config.pipeline_parallel > 1
    if size == 1:
        return None, config
    if device.type != "cpu":
        _check_gpus(config, device, staged)
    if pooling is not None and pooling.whole:
        raise InvalidParameter(setting, "is for decoders: an encoder is computed by one process", size)
    if pooling is not None and staged:
        raise InvalidParameter(setting, "is for models that write: vectors are computed by one process", size)
    if staged and (ahead := config.max_steps_in_flight or 1) > config.pipeline_parallel:
        raise InvalidParameter(
            "max_steps_in_flight", f"must be at most pipeline_parallel, {config.pipeline_parallel}", ahead
        )
    if config.stage_hosts and config.kv_cache_dir is not None:
        raise InvalidParameter("kv_cache_dir", "must be None with stage_hosts: pages lie on several machines")
    from asyncengine.execution.device.cores import threads_for
    from asyncengine.execution.runner.ranks import Ranks

    carrier, hosts = _ON_CPU if device.type == "cpu" else "nccl", config.stage_hosts
    ranks = Ranks(size, setting, carrier, config.pipeline_parallel, hosts)
    undo.callback(ranks.close)
    here = config.tensor_parallel if hosts else size
    return ranks, config.replace(num_threads=max(1, threads_for(config.num_threads, device) // here))


def _check_gpus(config: EngineConfig, device: torch.device, staged: bool) -> None:
    """Raises `InvalidParameter` where the ranks of a model cannot have a GPU each."""
    import torch

    if staged:
        raise InvalidParameter(
            "pipeline_parallel", 'on CUDA is not there yet: it needs device="cpu"', config.pipeline_parallel
        )
    count = torch.cuda.device_count()
    if count < config.tensor_parallel:
        raise InvalidParameter(
            "tensor_parallel", f"needs a GPU for each rank; visible here: {count}", config.tensor_parallel
        )
    if device.index:
        raise InvalidParameter(
            "device", 'must be "cuda" or "cuda:0": with tensor_parallel rank r is on cuda:r', config.device
        )
    if config.kv_cache_memory is None:
        raise InvalidParameter(
            "kv_cache_memory", "must be given with tensor_parallel on GPUs: that of all ranks together"
        )


def spread(load: partial[LoadedModel], ranks: Ranks | None) -> partial[LoadedModel]:
    """`load`, a call of `load_model` with all its positional arguments, such that the other ranks load their parts as
    well: from when rank 0 has found nothing to refuse, and has seen how much memory is free."""
    if ranks is None:
        return load
    path, config, *_, headless, threads = load.args

    @contextmanager
    def loading() -> Iterator[None]:
        from asyncengine.execution.runner.rank_worker import Order

        ranks.send("load", Order(path, config.replace(policy=EngineConfig().policy, show_progress=False), headless))
        with threads():
            yield

    return partial(load.func, *load.args[:-1], loading, ranks=ranks.gather, **load.keywords)
