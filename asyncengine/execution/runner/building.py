"""From a loaded model to a runner: states get memory, what a step takes is measured, the KV pool gets of the rest.

Then graphs are captured.
"""

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
from asyncengine.execution.runner.prompt_graphs import prompt_graph_sizes
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

# Seconds of steps in which one row computes a few tokens, measured at the first load of a process: what drafts cost.

_MAX_RUNS = 3
_AGREE = 0.04
"""Share by which two runs of a step may differ to be believed."""
_BRIEF, _LONG = 0.01, 0.5
"""Seconds of the smallest step below which each is run until two runs agree, and of a step from which on it is run once
(others twice: layers are recorded in the first). Somebody waits for the model, and what disturbs a step is a smaller
part of a long one: those are run again only if they look disturbed."""
_MAX_FALL = 1.5
"""Factor by which a step may take less time than one of fewer tokens, before one of the two was disturbed."""
_USUAL = (1.0, 1.15, 1.75, 4.75)
"""Steps of `MEASURED_SIZES`, in the smallest, that are assumed where nothing can be measured."""

_MAX_KEPT = 64
_kept: dict[Hashable, tuple[float, ...]] = {}
"""Measured times of this process by what they follow from, so that a model loaded again is not measured again."""

Run = Callable[[int], float]
"""Seconds of one step of so many tokens."""


def measure_steps(run: Run, key: Hashable = None) -> tuple[float, ...]:
    """Positive seconds of steps of `MEASURED_SIZES` tokens. `key`: what they follow from in this process, of which they
    are measured once; None: they are measured anew."""
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
    for place, size in enumerate(MEASURED_SIZES):
        if times[place] < _LONG or not place:  # all others are told in the smallest
            times[place] = min(times[place], run(size))
    for place, size in enumerate(MEASURED_SIZES):
        if times[place] > _most(times, place) * (1 + _AGREE):
            times[place] = min(times[place], run(size))
    return tuple(times)


def _most(times: Sequence[float], place: int) -> float:
    """Seconds of a step as its neighbours allow them. Reading weights takes the same whatever there is to compute, and
    computing grows with the tokens: drawn over tokens, times never bend down but where other kernels take over."""
    if place == 0:
        return times[1]
    if place == len(times) - 1:
        return times[-2] * MEASURED_SIZES[-1] / MEASURED_SIZES[-2]
    before, size, behind = MEASURED_SIZES[place - 1 : place + 2]
    return times[place - 1] + (times[place + 1] - times[place - 1]) * (size - before) / (behind - before)


def shortest(run: Run, count: int) -> float:
    """Seconds of the shortest of some runs: of two, where nothing disturbs them."""
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
"""Parameters that take the most memory beside the model's own: logits of all tokens, the sampler's copies of those it
samples from, counts for penalties. Masks of grammars come in small parts."""


class BuiltRunner(NamedTuple):
    """A warmed-up runner, with its memory, its step times and the reasons for what it cannot do. Bytes are the sum over
    all ranks and a draft model."""

    runner: ModelRunner | EncoderRunner
    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    fused: Sequence[str]
    """See `Loaded.fused`."""
    one_pool: str | None
    """Why all layers share their pages, also those with windows."""
    no_speculation: str | None
    """Why nothing may be guessed."""
    batch_variance: str | None
    """Why an answer may depend on the other requests of its batch; None: it does not."""
    step_costs: tuple[float, ...] | None = None
    """Seconds of steps of `MEASURED_SIZES` tokens."""
    draft_costs: tuple[float, ...] | None = None
    """Seconds of a draft model's passes, or a head's."""


_HELPS = "Lower max_num_batched_tokens, max_num_seqs or kv_cache_memory, or take a smaller model."


def build_runner(
    model: LoadedModel, config: EngineConfig, *, lora: LoraLayers | None = None, cores: Cores | None = None,
    progress: LoadProgress | None = None, pooler: Pooler | None = None, draft: LoadedModel | None = None,
    two_pools: bool = False, kept: Sequence[str] = (), left: Sequence[str] = (), images: ImageStore | None = None,
    ranks: Ranks | None = None,
) -> BuiltRunner:  # fmt: skip
    """Size the KV pool and make the runner. `progress` is told of what takes long.

    Raises `OutOfMemory` if the pool cannot hold one modest request, or if a step's working memory does not fit.

    What `lora` has allocated by now is not counted as free; `LoraLayers.allocate` takes it in advance.

    `cores`: the threads of the engine; None: as `config` says. `pooler`: of a model that is asked for vectors. `draft`:
    a smaller model that guesses; it raises `InvalidParameter` where nothing can be guessed. `two_pools`: rows will name
    window pages, where there are any (`Row.window`). `kept`: the kernels that Python calls, if all that a first answer
    needs are in the cache; `left`: those that nobody else compiles, first steps' own included. `images`: of a model
    that reads pictures. `ranks`: the other processes that have a part of the model each.
    """
    with on_device(model.device), progress or LoadProgress(config.show_progress) as bar:
        bar.stage("making room for keys and values")
        cores = cores or Cores(config.num_threads, model.device)
        work = partial(_build, model, config, lora, cores, bar, pooler, draft, two_pools, kept, left, images, ranks)
        return in_words(work, model.device, "what a step takes beside the weights", _HELPS)


def _build(
    model: LoadedModel, config: EngineConfig, lora: LoraLayers | None, cores: Cores, progress: LoadProgress,
    pooler: Pooler | None, draft: LoadedModel | None, two_pools: bool, kept: Sequence[str], left: Sequence[str],
    images: ImageStore | None, ranks: Ranks | None,
) -> BuiltRunner:  # fmt: skip
    device, tokens = model.device, config.max_num_batched_tokens
    release_cached(device)  # what loading left in torch's cache counts as taken
    copies = config.tensor_parallel if ranks is not None else 1  # each process has caches of its own
    elsewhere = 0 if ranks is None else sum(ranks.answers())  # until the others have their weights
    states = list(model.states) * copies
    devices = copies if device.type == "cuda" else 1  # whose memory is as free as this one's
    free = free_bytes(device) * devices - model.mapped_bytes  # which the system would drop, and read again in each step
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
        all_kernels=not kept, shared=memory,
    )  # fmt: skip
    reads_alone = "texts are given and none is written" if pooler else None
    no_speculation = reads_alone or _no_speculation(model, backend.name, config.speculation, tokens)
    second = None if draft is None else _draft_runner(draft, config, pages, cores)
    drafting = None if draft is None or second is None else DraftModel(second, draft.max_model_len)
    runner = make(
        model, backend, config.max_num_seqs, jump_forward=config.jump_forward is not False, lora=lora, cores=cores,
        num_states=num_states, pooler=pooler, images=images, ranks=ranks, draft=drafting,
    )  # fmt: skip
    if no_speculation is not None and (draft is not None or (runner.mtp is not None and model.head is not None)):
        raise InvalidParameter("draft_model", f"nothing can be guessed: {no_speculation}", config.draft_model)
    if ranks is not None:
        ranks.answers()  # until all can compute: a step does not wait for a compiler
    fused = model.fused
    if backend.name == "compiled":
        most = min(model.max_model_len - 1, (pages - 1) * config.page_size - 1, tokens)
        fused = _compile_kernels(runner, most, progress, model, kept, left)
        release_cached(device)
    elif ranks is not None:  # which find each other now
        runner.profile_run(prompt_step(runner, 1))
    costs = None if no_speculation is not None else config.speculation_costs or _measure_steps(runner, config)
    draft_costs = _begin_guessing(runner, drafting, second, config, costs)
    if device.type == "cuda" and config.cuda_graphs and pooler is None and backend.graphs and ranks is None:
        adapted = lora is not None and lora.nbytes > 0
        _capture_graphs(runner, config.max_num_seqs, tokens, device, progress, adapted=adapted)
    return BuiltRunner(
        runner, weights_bytes=model.weights_bytes + elsewhere + (0 if second is None else second.weights_bytes),
        kv_bytes=runner.kv_bytes * copies + (0 if second is None else second.kv_bytes),
        state_bytes=runner.state_bytes * copies, fused=fused, one_pool=one_pool, no_speculation=no_speculation,
        batch_variance=_batch_variance(model, backend.name), step_costs=costs, draft_costs=draft_costs,
    )  # fmt: skip


def _draft_runner(draft: LoadedModel, config: EngineConfig, pages: int, cores: Cores) -> ModelRunner:
    """The runner of a draft model, over a second pool of as many pages."""
    backend = make_backend(config, draft.layers, pages, draft.dtype, draft.device, draft.max_model_len)
    return ModelRunner(draft, backend, config.max_num_seqs, cores=cores)


def _compile_kernels(
    runner: ModelRunner, most: int, progress: LoadProgress, model: LoadedModel, kept: Sequence[str],
    left: Sequence[str],
) -> list[str]:  # fmt: skip
    """Run first steps, of one token, of a short prompt and of a long one, so that no request's step waits for a
    compiler. `most`: tokens that a prompt may have in a step. `kept`: kernels that need only be read, and then a step
    of one token calls what they are made of. `left`: those to be read behind it. Returns the forms in which the model
    runs."""
    from asyncengine.kernels.api import SamplerKernel

    progress.stage("running a first step")
    for count in first_lengths(model.weights_bytes, 1 if read_kept(kept) else max(1, most)):
        runner.profile_run(prompt_step(runner, count))
    # kernels that sample, for models without a list (`fallback`): their first steps do not call them
    read_kept(left if left or kept else SamplerKernel.names(draws=False, top_k=False, top_p=False)[1])
    runner.cores.forget()  # compiling is in what they took
    describe = getattr(runner.model, "describe", None)
    return model.fused if describe is None else describe()  # now it is known whether layers are recorded


def prompt_step(runner: ModelRunner, count: int) -> Batch:
    """A step that computes a prompt of so many tokens."""
    spec = RequestSpec(0, (0,) * count, GREEDY, count + 1, pooled=wanted_of(runner.pooler))
    return Batch(0, (_first_row(runner, spec, count),))


def _first_row(runner: ModelRunner, spec: RequestSpec, count: int) -> Row:
    """A request's first row, of so many tokens, in a profile run."""
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
    memory of states, the attention backend's own included.

    Kernels are compiled and libraries allocate on their first call, so that it also pays for what later steps find
    done; what they took outside of torch is no longer free afterwards. Raises torch's error if not even that fits.
    """
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
    """Why nothing may be guessed; None: it may."""
    if speculation == "off":
        return "speculation is off"
    if max(MEASURED_SIZES) > min(max_num_batched_tokens, model.max_model_len - 1):
        return f"max_num_batched_tokens or max_model_len is below {max(MEASURED_SIZES)}"
    on_gpu = model.device.type != "cpu"
    if model.states and on_gpu:
        return "the model keeps recurrent states, of which a GPU's kernels keep none between guesses"
    return None if on_gpu and speculation == "lookup" else _batch_variance(model, backend)


def _batch_variance(model: LoadedModel, backend: str) -> str | None:
    """Why an answer may depend on what is computed beside it; None: it does not."""
    if model.device.type != "cpu":
        return "on a GPU, sums depend on what is computed together"
    return model.unsteady or (None if backend == "compiled" else "attention is torch's")


def _begin_guessing(
    runner: ModelRunner, drafting: DraftModel | None, second: ModelRunner | None, config: EngineConfig,
    costs: tuple[float, ...] | None,
) -> tuple[float, ...] | None:  # fmt: skip
    """Have a head, or the draft model that `second` runs, guess from now on: seconds of its passes; None: nothing
    guesses. `costs`: seconds of steps; None: nothing can be guessed."""
    if runner.mtp is not None and costs is None:
        runner.stop_guessing()
    guesser = runner.mtp or drafting
    if costs is None or guesser is None:
        return None
    if runner.mtp is not None:
        made = config.draft_costs or measure_steps(runner.mtp.time_round, _followed(runner, config, True))
    else:
        assert second is not None
        made = config.draft_costs or _measure_steps(second, config, guesses=True)
    guesser.use(least_chance(costs, made))
    return made


def _measure_steps(runner: ModelRunner, config: EngineConfig, *, guesses: bool = False) -> tuple[float, ...]:
    """Seconds of steps in which one row computes and samples `MEASURED_SIZES` tokens, which is what drafts cost.

    `guesses`: it is a draft model, which scores its tokens; what the host does around a pass is part of it, as nothing
    else happens meanwhile.
    """
    params = replace(GREEDY, logprobs=True) if guesses else GREEDY

    def run(count: int) -> float:
        began = time.perf_counter()
        row = _first_row(runner, RequestSpec(0, (0,), params, count + 1), count)
        if row.state is not None:  # the same slots again and again where there are few: nobody reads what they hold
            most = runner.num_states - 1
            between = tuple(1 + (1 + place) % most for place in range(count - 1))
            row = row._replace(state=row.state._replace(guesses=between))
        seconds = runner.profile_run(Batch(0, (row._replace(drafts=(0,) * (count - 1)),))).seconds
        return time.perf_counter() - began if guesses else seconds

    times = measure_steps(run, _followed(runner, config, guesses))
    runner.cores.forget()
    return times


def _followed(runner: ModelRunner, config: EngineConfig, guesses: bool) -> Hashable:
    """All that step times follow from on one machine, beside weights; None: that is not known of transformers'
    modules."""
    model = runner.model
    if not isinstance(model, Decoder):
        return None
    return (
        model.key, config.page_size, config.kv_cache_dtype, config.tensor_parallel, config.pipeline_parallel,
        runner.num_window_pages > 0, runner.cores.most, guesses,
    )  # fmt: skip


def first_state(num_states: int, slot: int) -> StateUse | None:
    """For the first row of a sequence in a profile run."""
    return StateUse(slot + 1, 0) if num_states else None


def largest_step(
    page_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_states: int = 0,
    pooled: Pooled | None = None,
) -> tuple[Batch, int]:  # fmt: skip
    """The largest step there can be, and the pages of a pool that holds it, page 0 included."""
    budget = max_num_batched_tokens
    count = min(max_num_seqs, budget)
    if num_states:
        count = min(count, num_states - 1)
    rows: list[Row] = []
    page = 1
    for slot in range(count):
        left = budget - (count - slot - 1)  # the others need one token each
        length = min(left, max_model_len - 1)
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
    """Capture all graphs, and say what they took. Without memory for them, steps run without.

    `tokens`: most of a step. `adapted`: there is memory of adapters, so that there are graphs with them as well.
    """
    sizes = graph_sizes(min(max_num_seqs, tokens))
    prompts = prompt_graph_sizes(tokens) if runner.may_cut else []
    count, kinds = len(sizes), 1 + adapted
    release_cached(device)  # else they would be served from there, and seem to take nothing
    before, began, kind = free_bytes(device), time.perf_counter(), "decode steps"
    progress.stage("capturing CUDA graphs", kinds * (len(sizes) + len(prompts)))
    try:
        capture = CudaCapture()
        runner.use_graphs(sizes, capture, progress.advance)
        if prompts:
            kind = "steps with prompts"
            runner.use_prompt_graphs(prompts, capture.in_pieces, progress.advance)
            count += len(prompts)
    except Exception as error:
        logger.warning("%s run without CUDA graphs: %s", kind, error)
        if kind == "decode steps":
            release_cached(device)
            return
    release_cached(device)
    taken, seconds = (before - free_bytes(device)) / 2**20, time.perf_counter() - began
    logger.info("captured %d CUDA graphs in %.1f s; they take %.0f MiB", count * kinds, seconds, taken)
