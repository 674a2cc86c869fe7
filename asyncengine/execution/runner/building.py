"""From a loaded model to a runner: memory of states, a measured step, the KV pool from what is left, then graphs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.execution.attention.factory import make_backend
from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.memory import free_bytes, in_words, release_cached
from asyncengine.execution.device.transfer import on_device
from asyncengine.execution.layers.recorded import GREEDY, first_lengths
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import LoadedModel
from asyncengine.execution.models.memory.caches import num_states_for, pool_sizes, room_for, state_bytes
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.pooling.pool import Pooler
from asyncengine.execution.runner.draft_model import DraftModel, cycled_pages, least_chance
from asyncengine.execution.runner.graphs import CudaCapture, graph_sizes
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.prompt_graphs import may_be_cut, prompt_graph_sizes
from asyncengine.execution.runner.ranks import Ranks
from asyncengine.execution.runner.stages import runner_of
from asyncengine.execution.runner.step_inputs import ImageStore
from asyncengine.kernels.api import read_kept
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import MEASURED_SIZES, Batch, Row, StateUse, WindowPages

if TYPE_CHECKING:
    from asyncengine.execution.runner.encoder_runner import EncoderRunner

# Seconds of steps in which one row computes a few tokens, measured at the first load of a process. By these the
# scheduler decides whether guessing pays: a step that verifies n drafts is a step of n + 1 tokens.

_MAX_RUNS = 3
_AGREE = 0.04
"""Largest relative difference of two runs of a step that still counts as agreement."""
_BRIEF, _LONG = 0.01, 0.5
"""Bounds in seconds. If the smallest step is below the first, each step is run until two runs agree. Otherwise a step
runs twice (the first run records its layers), or once if it takes longer than the second bound: the caller waits for
the load, and a disturbance matters less to a long step. Only runs that look disturbed are repeated."""
_MAX_FALL = 1.5
"""Factor by which a step may be faster than one of fewer tokens; beyond it, one of the two measurements is wrong."""
_USUAL = (1.0, 1.15, 1.75, 4.75)
"""Times of steps of `MEASURED_SIZES` tokens relative to the smallest, assumed where measuring fails."""

_MAX_KEPT = 64
_kept: dict[Hashable, tuple[float, ...]] = {}
"""Measured times of this process by `_timing_key`, so that a model loaded again is not measured again."""

Run = Callable[[int], float]
"""Runs one step of the given number of tokens, and returns its seconds."""


def measure_steps(run: Run, key: Hashable = None) -> tuple[float, ...]:
    """Positive seconds of steps of `MEASURED_SIZES` tokens. `key`: everything the times depend on in this process;
    steps are measured once for each key, and always if it is None."""
    if key is not None and key in _kept:
        return _kept[key]
    times: tuple[float, ...] = ()
    for _ in range(2):
        times = _measured(run)
        if is_sound(times):
            if key is not None:
                _kept[key] = times
                for oldest in list(_kept)[:-_MAX_KEPT]:
                    _kept.pop(oldest, None)
            return times
    logger.info("step times cannot be measured here, usual ones are taken: %s", times)
    unit = min((value for value in times if 0 < value < math.inf), default=_BRIEF)
    return tuple(unit * usual for usual in _USUAL)


def is_sound(times: Sequence[float]) -> bool:
    """Whether `times` can be those of steps of `MEASURED_SIZES` tokens."""
    usable = len(times) == len(MEASURED_SIZES) and all(0 < value < math.inf for value in times)
    return usable and all(before <= _MAX_FALL * value for before, value in pairwise(times))


def _measured(run: Run) -> tuple[float, ...]:
    first = run(MEASURED_SIZES[0])
    if first < _BRIEF:
        return tuple(shortest(run, count) for count in MEASURED_SIZES)
    times = [first, *map(run, MEASURED_SIZES[1:])]
    for index, size in enumerate(MEASURED_SIZES):
        if times[index] < _LONG or not index:  # the smallest always runs twice: costs are told relative to it
            times[index] = min(times[index], run(size))
    for index, size in enumerate(MEASURED_SIZES):
        if times[index] > _most(times, index) * (1 + _AGREE):
            times[index] = min(times[index], run(size))
    return tuple(times)


def _most(times: Sequence[float], index: int) -> float:
    """Largest plausible seconds of step `index`, by interpolating its neighbours. Time is a constant part (reading
    weights) and one that grows with the tokens (computing), so it is convex in the number of tokens, except where
    other kernels take over."""
    if index == 0:
        return times[1]
    if index == len(times) - 1:
        return times[-2] * MEASURED_SIZES[-1] / MEASURED_SIZES[-2]
    smaller, size, larger = MEASURED_SIZES[index - 1 : index + 2]
    return times[index - 1] + (times[index + 1] - times[index - 1]) * (size - smaller) / (larger - smaller)


def shortest(run: Run, count: int) -> float:
    """Seconds of the shortest of up to `_MAX_RUNS` runs; two runs if they agree."""
    taken = [run(count)]
    while len(taken) < _MAX_RUNS:
        taken.append(run(count))
        first, second = sorted(taken)[:2]
        if second <= first * (1 + _AGREE):
            break
    return min(taken)


logger = logging.getLogger("asyncengine")

_SAMPLED = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=0, repetition_penalty=1.1, min_tokens=1, logprobs=True, top_logprobs=20,
    prompt_logprobs=True,
)  # fmt: skip
"""Parameters of the profile run that need the most memory: logits of all tokens, the sampler's copies of the logits it
samples from, counts for penalties. Grammars' masks are applied in small chunks and do not count."""


class BuiltRunner(NamedTuple):
    """A warmed-up runner, its memory and step times, and the reasons for features it lacks. Bytes are sums over all
    ranks and a draft model."""

    runner: ModelRunner | EncoderRunner
    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    fused: Sequence[str]
    """See `Loaded.fused`."""
    one_pool: str | None
    """Why all layers share their pages, also those with windows."""
    no_speculation: str | None
    """Why speculation is impossible; None: it is possible."""
    batch_variance: str | None
    """Why an answer may depend on the other requests of its batch; None: it does not."""
    step_costs: tuple[float, ...] | None = None
    """Seconds of steps of `MEASURED_SIZES` tokens."""
    draft_costs: tuple[float, ...] | None = None
    """Seconds of passes of the draft model, or of the model's own MTP head, of `MEASURED_SIZES` tokens."""


_HELPS = "Lower max_num_batched_tokens, max_num_seqs or kv_cache_memory, or take a smaller model."


def build_runner(
    model: LoadedModel, config: EngineConfig, *, lora: LoraLayers | None = None, cores: Cores | None = None,
    progress: LoadProgress | None = None, pooler: Pooler | None = None, draft: LoadedModel | None = None,
    two_pools: bool = False, cached: Sequence[str] = (), uncached: Sequence[str] = (), images: ImageStore | None = None,
    ranks: Ranks | None = None,
) -> BuiltRunner:  # fmt: skip
    """Size the KV pool and make the runner. `progress` reports stages that take long.

    Raises `OutOfMemory` if the pool cannot hold one modest request, or if a step's working memory does not fit.

    Memory that `lora` has allocated by now is not counted as free; `LoraLayers.allocate` takes it in advance.

    `cores`: the threads of the engine; None: as `config` says. `pooler`: of an embedding or scoring model. `draft`: a
    smaller model for speculation; `InvalidParameter` is raised if speculation is impossible. `two_pools`: rows will
    name window pages, where there are any (`Row.window`). `cached`: the kernels that Python calls, if all kernels of a
    first answer are in the cache; `uncached`: kernels that no compiling process will make, those of first steps
    included. `images`: encoded pictures of a multimodal model. `ranks`: the other processes, with shards of it."""
    with on_device(model.device), progress or LoadProgress(config.show_progress) as bar:
        bar.stage("making room for keys and values")
        cores = cores or Cores(config.num_threads, model.device)
        kernels = cached, uncached
        work = partial(_build, model, config, lora, cores, bar, pooler, draft, two_pools, *kernels, images, ranks)
        return in_words(work, model.device, "what a step takes beside the weights", _HELPS)


def _build(
    model: LoadedModel, config: EngineConfig, lora: LoraLayers | None, cores: Cores, progress: LoadProgress,
    pooler: Pooler | None, draft: LoadedModel | None, two_pools: bool, cached: Sequence[str], uncached: Sequence[str],
    images: ImageStore | None, ranks: Ranks | None,
) -> BuiltRunner:  # fmt: skip
    device, tokens = model.device, config.max_num_batched_tokens
    release_cached(device)  # else memory that loading left in torch's cache would count as taken
    copies = config.tensor_parallel if ranks is not None else 1  # each process has caches of its own
    elsewhere = 0 if ranks is None else sum(ranks.answers())  # waits until all ranks have loaded: then sizes are final
    states = list(model.states) * copies
    devices = copies if device.type == "cuda" else 1  # each rank's GPU is taken to be as free as this one's
    # the page cache of mapped weights counts as free, but the system would have to read them again in each step
    free = free_bytes(device) * devices - model.mapped_bytes
    num_states = num_states_for(states, config.state_memory, config.max_num_seqs, model.dtype, device, free)
    taken = num_states * state_bytes(states, model.dtype)
    if device.type == "cuda" and config.kv_cache_memory is None:
        taken += _working_bytes(model, config, num_states, pooler)
    pages, window_pages, one_pool = pool_sizes(
        list(model.layers) * copies, config, model.max_model_len, model.dtype, device, free - taken,
        others=() if draft is None else draft.layers, states=bool(num_states), divide=two_pools,
    )  # fmt: skip
    room = room_for(model.layers, model.states, pages, window_pages, num_states, config.page_size, model.dtype)
    if ranks is not None:
        ranks.send("build", pages, window_pages, num_states, room)
    make, memory = runner_of(model, tokens, None if ranks is None else ranks.gather, room)
    backend = make_backend(
        config, model.layers, pages, model.dtype, device, model.max_model_len, num_window_pages=window_pages,
        all_kernels=not cached, shared=memory,
    )  # fmt: skip
    reads_alone = "texts are given and none is written" if pooler else None
    no_speculation = reads_alone or _no_speculation(model, backend.name, config.speculation, tokens)
    draft_runner = None if draft is None else _draft_runner(draft, config, pages, cores)
    drafting = None if draft is None or draft_runner is None else DraftModel(draft_runner, draft.max_model_len)
    runner = make(
        model, backend, config.max_num_seqs, jump_forward=config.jump_forward is not False, lora=lora, cores=cores,
        num_states=num_states, pooler=pooler, images=images, ranks=ranks, draft=drafting,
    )  # fmt: skip
    if no_speculation is not None and (draft is not None or (runner.mtp is not None and model.head is not None)):
        raise InvalidParameter("draft_model", f"nothing can be guessed: {no_speculation}", config.draft_model)
    if ranks is not None:
        ranks.answers()  # waits until all ranks can compute, so that no step waits for a compiler
    fused = model.fused
    if backend.name == "compiled":
        most = min(model.max_model_len - 1, (pages - 1) * config.page_size - 1, tokens)
        fused = _compile_kernels(runner, most, progress, model, cached, uncached)
        release_cached(device)
    elif ranks is not None:  # NCCL connects at the first exchange: here rather than in a request's step
        runner.profile_run(prompt_step(runner, 1))
    costs = None if no_speculation is not None else config.speculation_costs or _measure_steps(runner, config)
    draft_costs = _begin_guessing(runner, drafting, draft_runner, config, costs)
    if device.type == "cuda" and config.cuda_graphs and pooler is None and backend.graphs and ranks is None:
        adapted = lora is not None and lora.nbytes > 0
        _capture_graphs(runner, config.max_num_seqs, tokens, device, progress, adapted=adapted)
    draft_weights, draft_kv = (0, 0) if draft_runner is None else (draft_runner.weights_bytes, draft_runner.kv_bytes)
    return BuiltRunner(
        runner, weights_bytes=model.weights_bytes + elsewhere + draft_weights,
        kv_bytes=runner.kv_bytes * copies + draft_kv,
        state_bytes=runner.state_bytes * copies, fused=fused, one_pool=one_pool, no_speculation=no_speculation,
        batch_variance=_batch_variance(model, backend.name), step_costs=costs, draft_costs=draft_costs,
    )  # fmt: skip


def _draft_runner(draft: LoadedModel, config: EngineConfig, pages: int, cores: Cores) -> ModelRunner:
    """The runner of a draft model, over a second pool of as many pages."""
    backend = make_backend(config, draft.layers, pages, draft.dtype, draft.device, draft.max_model_len)
    return ModelRunner(draft, backend, config.max_num_seqs, cores=cores)


def _compile_kernels(
    runner: ModelRunner, most: int, progress: LoadProgress, model: LoadedModel, cached: Sequence[str],
    uncached: Sequence[str],
) -> list[str]:  # fmt: skip
    """Run first steps, of one token, of a short prompt and of a long one, so that no request's step waits for a
    compiler. `most`: tokens that a prompt may have in a step. `cached`: kernels to be read from the cache first; a step
    of one token then calls all that they call. `uncached`: kernels to be read after it. Returns the weight forms and
    kernels that the model runs with."""
    from asyncengine.kernels.api import SamplerKernel

    progress.stage("running a first step")
    for count in first_lengths(model.weights_bytes, 1 if read_kept(cached) else max(1, most)):
        runner.profile_run(prompt_step(runner, count))
    # kernels that sample, for models without a list (`fallback`): their first steps do not call them
    read_kept(uncached if uncached or cached else SamplerKernel.names(draws=False, top_k=False, top_p=False)[1])
    runner.cores.forget()  # these steps' times include compiling
    describe = getattr(runner.model, "describe", None)
    return model.fused if describe is None else describe()  # asked again: layers are recorded by the first steps


def prompt_step(runner: ModelRunner, count: int) -> Batch:
    """A step that computes a prompt of `count` tokens."""
    spec = RequestSpec(0, (0,) * count, GREEDY, count + 1, pooled=wanted_of(runner.pooler))
    return Batch(0, (_first_row(runner, spec, count),))


def _first_row(runner: ModelRunner, spec: RequestSpec, count: int) -> Row:
    """A request's first row, of `count` tokens, in a profile run."""
    number, windows = -(-count // runner.page_size), runner.num_window_pages
    pages = cycled_pages(number, runner.num_pages)
    window = WindowPages(0, cycled_pages(number, windows)) if windows > 1 else None
    tokens, state = [0] * spec.prompt_len, first_state(runner.num_states, 0)
    return Row(spec, 0, 0, count, tokens, False, pages, True, state=state, window=window)


def wanted_of(pooler: Pooler | None) -> Pooled | None:
    """The result that requests of a model with a pooler ask for; None: tokens."""
    return None if pooler is None else Pooled(every=pooler.every)


def _working_bytes(model: LoadedModel, config: EngineConfig, num_states: int, pooler: Pooler | None = None) -> int:
    """Bytes that a step of `max_num_seqs` rows and `max_num_batched_tokens` tokens takes beside weights, KV memory and
    memory of states; the attention backend's workspaces included.

    The step also compiles kernels and makes libraries allocate, which they do once; memory that they take outside of
    torch's allocator is no longer free afterwards. Raises torch's error if a minimal pool does not fit."""
    device = model.device
    sizes = config.page_size, config.max_num_seqs, config.max_num_batched_tokens, model.max_model_len
    batch, pages = largest_step(*sizes, num_states, wanted_of(pooler))
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    backend = make_backend(config, model.layers, pages, model.dtype, device, model.max_model_len)
    runner = ModelRunner(model, backend, config.max_num_seqs, num_states=num_states, pooler=pooler)
    try:
        runner.profile_run(batch)
        pools = runner.kv_bytes + num_states * state_bytes(model.states, model.dtype)
        return torch.cuda.max_memory_allocated(device) - before - pools
    finally:
        runner.close()
        del runner, backend
        release_cached(device)


def _no_speculation(model: LoadedModel, backend: str, speculation: str, max_num_batched_tokens: int) -> str | None:
    """Why speculation is impossible; None: it is possible."""
    if speculation == "off":
        return "speculation is off"
    if max(MEASURED_SIZES) > min(max_num_batched_tokens, model.max_model_len - 1):
        return f"max_num_batched_tokens or max_model_len is below {max(MEASURED_SIZES)}"
    on_gpu = model.device.type != "cpu"
    if model.states and on_gpu:
        return "the model keeps recurrent states, of which a GPU's kernels keep none between guesses"
    return None if on_gpu and speculation == "lookup" else _batch_variance(model, backend)


def _batch_variance(model: LoadedModel, backend: str) -> str | None:
    """Why an answer may depend on the other requests of its batch; None: it does not."""
    if model.device.type != "cpu":
        return "on a GPU, sums depend on what is computed together"
    return model.unsteady or (None if backend == "compiled" else "attention is torch's")


def _begin_guessing(
    runner: ModelRunner, drafting: DraftModel | None, draft_runner: ModelRunner | None, config: EngineConfig,
    costs: tuple[float, ...] | None,
) -> tuple[float, ...] | None:  # fmt: skip
    """Let the MTP head, or the draft model that `draft_runner` runs, guess from now on. Returns seconds of its passes;
    None if there is no guesser. `costs`: seconds of steps; None: speculation is impossible."""
    if runner.mtp is not None and costs is None:
        runner.stop_guessing()
    guesser = runner.mtp or drafting
    if costs is None or guesser is None:
        return None
    if runner.mtp is not None:
        draft_costs = config.draft_costs or measure_steps(runner.mtp.time_round, _timing_key(runner, config, True))
    else:
        assert draft_runner is not None
        draft_costs = config.draft_costs or _measure_steps(draft_runner, config, guesses=True)
    guesser.use(least_chance(costs, draft_costs))
    return draft_costs


def _measure_steps(runner: ModelRunner, config: EngineConfig, *, guesses: bool = False) -> tuple[float, ...]:
    """Seconds of steps in which one row computes and samples `MEASURED_SIZES` tokens: the cost of verifying drafts.

    `guesses`: the runner is a draft model's. Its passes return log-probabilities, and the host's work around a pass
    counts, since the large model waits for it.
    """
    params = replace(GREEDY, logprobs=True) if guesses else GREEDY

    def run(count: int) -> float:
        began = time.perf_counter()
        row = _first_row(runner, RequestSpec(0, (0,), params, count + 1), count)
        if row.state is not None:  # slots are reused where there are few: no row reads these states
            most = runner.num_states - 1
            between = tuple(1 + (1 + index) % most for index in range(count - 1))
            row = row._replace(state=row.state._replace(guesses=between))
        seconds = runner.profile_run(Batch(0, (row._replace(drafts=(0,) * (count - 1)),))).seconds
        return time.perf_counter() - began if guesses else seconds

    times = measure_steps(run, _timing_key(runner, config, guesses))
    runner.cores.forget()
    return times


def _timing_key(runner: ModelRunner, config: EngineConfig, guesses: bool) -> Hashable:
    """Everything that step times depend on in one process, except the weights' values. None for transformers' modules,
    of which it is not known."""
    model = runner.model
    if not isinstance(model, Decoder):
        return None
    return (
        model.key, config.page_size, config.kv_cache_dtype, config.tensor_parallel, config.pipeline_parallel,
        runner.num_window_pages > 0, runner.cores.most, guesses,
    )  # fmt: skip


def first_state(num_states: int, slot: int) -> StateUse | None:
    """State slots of the first row of a sequence in a profile run; None: the model keeps no states."""
    return StateUse(slot + 1, 0) if num_states else None


def largest_step(
    page_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_states: int = 0,
    pooled: Pooled | None = None,
) -> tuple[Batch, int]:  # fmt: skip
    """The largest step there can be, and the number of pages that a pool needs for it, page 0 included."""
    budget = max_num_batched_tokens
    count = min(max_num_seqs, budget)
    if num_states:
        count = min(count, num_states - 1)
    rows: list[Row] = []
    page = 1
    for slot in range(count):
        available = budget - (count - slot - 1)  # each later row needs one token at least
        length = min(available, max_model_len - 1)
        budget -= length
        pages = list(range(page, page + -(-length // page_size)))
        page += len(pages)
        spec = RequestSpec(slot + 1, (0,) * length, _SAMPLED, length + 1, seed=slot, stop_ids=(0,), pooled=pooled)
        state = first_state(num_states, slot)
        rows.append(Row(spec, slot, 0, length, [0] * length, False, pages, True, state=state))
    return Batch(0, tuple(rows)), page


def _capture_graphs(
    runner: ModelRunner, max_num_seqs: int, tokens: int, device: torch.device, progress: LoadProgress, *, adapted: bool
) -> None:
    """Capture all graphs, and log their time and memory. Where memory is short, steps run without graphs.

    `tokens`: the most tokens of a step. `adapted`: adapters have memory, so graphs with them are captured, too."""
    sizes = graph_sizes(min(max_num_seqs, tokens))
    prompts = prompt_graph_sizes(tokens) if may_be_cut(runner.model, runner.backend) else []
    count, variants = len(sizes), 1 + adapted
    release_cached(device)  # else graphs would be served from torch's cache, and seem to take nothing
    before, began, steps = free_bytes(device), time.perf_counter(), "decode steps"
    progress.stage("capturing CUDA graphs", variants * (len(sizes) + len(prompts)))
    try:
        capture = CudaCapture()
        runner.use_graphs(sizes, capture, progress.advance)
        if prompts:
            steps = "steps with prompts"
            runner.use_prompt_graphs(prompts, capture.in_pieces, progress.advance)
            count += len(prompts)
    except Exception as error:
        logger.warning("%s run without CUDA graphs: %s", steps, error)
        if steps == "decode steps":
            release_cached(device)
            return
    release_cached(device)
    taken, seconds = (before - free_bytes(device)) / 2**20, time.perf_counter() - began
    logger.info("captured %d CUDA graphs in %.1f s; they take %.0f MiB", count * variants, seconds, taken)
