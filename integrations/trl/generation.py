"""Generation for TRL's trainers: an engine in the place of their vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from asyncengine import SamplingParams
from asyncengine.errors import AdapterError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.integrations.engine_source import AnyEngine, EngineSource
from asyncengine.integrations.trl.trainer_weights import active_adapter, named_weights

logger = logging.getLogger(__name__)

Generated = tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], list[list[list[int]]]]
"""Prompts and completions as token ids, then for each token of each completion a list of one log-probability and a list
of that one token's id, as vLLM's "the sampled token only"."""

RolloutFunction = Callable[[list[Any], Any], dict[str, Any]]
"""Samples from prompts, for a trainer."""
OURS = ("n", "seed", "logprobs", "logprobs_of", "top_logprobs", "prompt_logprobs", "prompt_logprobs_start")
"""Sampling parameters that this adapter sets itself."""
STRUCTURES: Mapping[str, Callable[..., Grammar]] = {
    "json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.ebnf,
}  # fmt: skip
"""Fields of vLLM's `structured_outputs`, with the makers of their grammars."""


class EngineGeneration:
    """The object that TRL's trainers have in `vllm_generation`: they call its `sync_weights` and its `generate`.

    Sampling parameters are the trainer's at the time of the call (`temperature`, `top_p`, `top_k`, `min_p`,
    `repetition_penalty`, `max_completion_length`, and `args.generation_kwargs` over them, by the names of
    `SamplingParams`). Seeds are drawn from torch's generator, so `args.seed` makes a training repeatable.
    """

    def __init__(self, engine: AnyEngine, trainer: Any, *, adapter: str = "trl-policy") -> None:
        """`engine`: hosted (an `Engine`, or an `AsyncEngine` with hosted=True), of the model that `trainer` trains; it
        stays yours to close. `adapter`: the name under which a PEFT adapter is loaded into it.

        Raises `InvalidParameter` for anything but an engine.
        """
        if not isinstance(engine, AnyEngine):
            raise InvalidParameter("engine", "must be an Engine, or an AsyncEngine with hosted=True", engine)
        self.engine = EngineSource("", {}, engine).sync()
        self.trainer = trainer
        self.adapter = adapter
        self._takes_adapter = True
        self._serving: str | None = None
        """The adapter that requests name; None: all weights are in the model itself."""
        self._base_pushed = False

    @property
    def llm(self) -> Any:
        """The only attribute of vLLM's object that trainers with tools read: the context's length."""
        config = SimpleNamespace(max_model_len=self.engine.info.max_model_len)
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=config))

    # ---------------------------------------------------------------- weights

    def sync_weights(self) -> None:
        """Give the engine the weights that the trainer's model has now, as version `trainer.state.global_step`.

        Of a PEFT model only the adapter is pushed, beside the model below it, which is pushed once. An adapter that the
        engine does not serve (DoRA, `modules_to_save`) is merged for the push instead. Raises as
        `Engine.update_weights`.
        """
        model = self.trainer.model
        with self._whole(model):
            if not hasattr(model, "peft_config"):
                self._push(model)
            elif not (self._takes_adapter and self._push_adapter(model)):
                with _merged(model):
                    self._push(model)

    def _push(self, model: Any) -> None:
        self.engine.update_weights(named_weights(model), version=self.trainer.state.global_step)

    def _push_adapter(self, model: Any) -> bool:
        """Load the adapter into the engine. False: the engine does not serve such adapters."""
        from peft import get_peft_model_state_dict

        name = active_adapter(model)
        tensors = get_peft_model_state_dict(model, adapter_name=name)
        try:
            self.engine.load_adapter(self.adapter, tensors=tensors, config=model.peft_config[name])
        except AdapterError as error:
            logger.warning("the adapter is merged into the weights at each update: %s", error)
            self._takes_adapter, self._serving = False, None
            return False
        if not self._base_pushed and not getattr(model.get_base_model(), "is_quantized", False):
            self._push(model)
        self._base_pushed, self._serving = True, self.adapter
        return True

    def _whole(self, model: Any) -> AbstractContextManager[None]:
        """Gather the parameters that DeepSpeed shards; FSDP's shards are gathered when they are read."""
        distributed = getattr(self.trainer, "_dist", None)
        if distributed is None:
            return nullcontext()
        return distributed.gather_params(list(model.parameters()))

    # ---------------------------------------------------------------- completions

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Sequence[Any] | None = None, num_generations: int = 1,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> Generated:  # fmt: skip
        """One completion of each of `prompts`, token ids that TRL has repeated `num_generations` times already; all are
        computed in shared batches, equal prompts once.

        A completion ends with one of `trainer.eos_token_ids`, which is part of it, or is cut at
        `max_completion_length`. Log-probabilities are of the distribution that was sampled. Raises `InvalidParameter`
        for images and unknown sampling parameters, `ContextLengthExceeded` for a prompt that leaves no room, and what
        `Engine.generate` raises.
        """
        if images is not None and any(images):
            raise InvalidParameter("images", "cannot be given with token ids; this adapter trains on text alone")
        fields = self._sampling()
        seeds = torch.randint(2**62, (len(prompts),)).tolist()
        streams = []
        with profiler or nullcontext():
            try:
                for prompt, seed in zip(prompts, seeds, strict=True):
                    params = SamplingParams(**fields, seed=seed, logprobs_of="sampled")
                    streams.append(
                        self.engine.stream(list(prompt), params, adapter=self._serving, clip_max_tokens=True)
                    )
                completions = [stream.result() for stream in streams]
            finally:
                for stream in streams:
                    stream.close()
        scores: list[list[list[float | None]]] = [
            [[entry.logprob] for entry in completion.logprobs or ()] for completion in completions
        ]
        ids = [completion.token_ids for completion in completions]
        return [list(prompt) for prompt in prompts], ids, scores, [[[token] for token in row] for row in ids]

    def _sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams` for the trainer's settings."""
        trainer = self.trainer
        args, ends = getattr(trainer, "args", None), getattr(trainer, "eos_token_ids", None)  # older TRL has one id
        fields: dict[str, Any] = {
            **{name: getattr(trainer, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")},
            "min_p": trainer.min_p or 0.0,
            "max_tokens": trainer.max_completion_length,
            "ignore_eos": True,  # the model's own ids; those that the trainer knows stop instead
            "stop_token_ids": [trainer._tokenizer.eos_token_id] if ends is None else ends,
            "on_budget": "truncate",  # closing by other tokens than the drawn ones would score them with -inf
            "skip_special_tokens": False,
        }
        regex = getattr(args, "vllm_structured_outputs_regex", None)
        if regex is not None:
            fields["grammar"] = Grammar.regex(regex)
        overrides = dict(getattr(args, "generation_kwargs", None) or {})
        for name in OURS:
            if name in overrides:
                raise InvalidParameter(f"generation_kwargs[{name!r}]", "is set by the adapter", overrides[name])
        if "structured_outputs" in overrides:
            structure = _structure(overrides.pop("structured_outputs"))
            fields.setdefault("grammar", structure)  # the trainer's expression takes precedence, as in TRL
        fields |= overrides
        SamplingParams.from_dict(fields)  # which names an unknown one, with the nearest known
        return fields


def _structure(value: Any) -> Grammar:
    """The grammar of vLLM's `structured_outputs`. Raises `InvalidParameter` unless it has exactly one known field."""
    specs = {name: spec for name, spec in value.items() if spec is not None} if isinstance(value, Mapping) else {}
    if len(specs) != 1 or not specs.keys() <= STRUCTURES.keys():
        names = ", ".join(STRUCTURES)
        raise InvalidParameter("generation_kwargs['structured_outputs']", f"must be a dict of one of {names}", value)
    [(name, spec)] = specs.items()
    return STRUCTURES[name](spec)


@contextmanager
def _merged(model: Any) -> Iterator[None]:
    """Merge the PEFT adapter into `model` meanwhile. The weights below it are put back as they were, to the bit:
    subtracting what was added would leave a rounding error behind at every step of a training."""
    kept = {
        name: tensor.detach().clone()
        for name, tensor in model.named_parameters()
        if "base_layer" in name and tensor.is_floating_point()
    }
    model.merge_adapter()
    try:
        yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():
            for name, tensor in kept.items():
                model.get_parameter(name).copy_(tensor)


def attach(trainer: Any, engine: AnyEngine, *, adapter: str = "trl-policy") -> EngineGeneration:
    """Let `engine` generate for `trainer`, TRL's GRPOTrainer or RLOOTrainer, from now on.

    Leave `use_vllm` out of the trainer's arguments: vLLM need not be installed. The trainer then takes the path that it
    has for vLLM, with its correction for the difference between the distributions that were sampled and trained
    (`vllm_importance_sampling_correction` and its neighbours). Raises as `EngineGeneration`.
    """
    generation = EngineGeneration(engine, trainer, adapter=adapter)
    trainer.vllm_generation = generation
    trainer.use_vllm = True
    trainer._last_loaded_step = -1  # so that its first step pushes the weights
    return generation


def rollout(engine: AnyEngine, *, adapter: str = "trl-policy") -> RolloutFunction:
    """A `rollout_func` for GRPOTrainer that samples from `engine`, a hosted engine of the model that is trained.

    It takes prompts (conversations or texts, one for each completion: TRL repeats them), renders them by the trainer's
    own chat template, and returns "prompt_ids", "completion_ids" and "logprobs", lists of a list for each completion.
    The engine gets the trainer's weights first if `trainer.state.global_step` has moved. It fits trainers that sample
    one turn; with tools, and for the correction by importance, see `attach`. Raises as `EngineGeneration`.
    """
    generation: EngineGeneration | None = None
    synced: int | None = None

    def sample(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        nonlocal generation, synced
        if generation is None or generation.trainer is not trainer:
            generation, synced = EngineGeneration(engine, trainer, adapter=adapter), None
        if trainer.state.global_step != synced:
            generation.sync_weights()
            synced = trainer.state.global_step
        ids, images, _ = trainer._tokenize_prompts(prompts)
        prompt_ids, completion_ids, logprobs, _ = generation.generate(ids, images)
        scores = [[score for (score,) in row] for row in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": scores}

    return sample
