"""`make_exact`: a transformers model whose values are the engine's and whose gradients are its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from asyncengine.async_engine import AsyncEngine
from asyncengine.checks import as_number
from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.execution.models.decoder_layer import DecoderLayer
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.exact_layers import ExactLayers, Sequences, read_sequences, why_not_exact
from asyncengine.execution.sampling.logprobs import token_logprobs
from asyncengine.integrations.trl.recompute import Outputs, RoutingReplay, recomputed, recomputed_module, replaced
from asyncengine.integrations.trl.trainer_weights import adapter_on, base_of, exact_weights, take_adapter, versions_of
from asyncengine.lora.checkpoint.peft_loader import PeftLoader
from asyncengine.sync_engine import Engine

_BLOCK_ELEMENTS = 2**24
"""Most logits of scored tokens that are held at once."""
_UNLIKE = 0.05
"""Relative error of a layer's contribution, at half of the tokens, beyond which the two models are not the same."""
_ORIGINAL = object()
"""Sentinel in place of a `_Run`: transformers' own forward is used."""
IGNORED = -100
"""transformers' label of tokens that are not scored."""


@dataclass
class TokenScores(ModelOutput):  # type: ignore[misc]
    """Scores of a batch's tokens, as TRL's fused output layer gives them: float32 [B, S - 1], each token's under the
    distribution before it, and 0 where the label is `IGNORED`."""

    loss: torch.Tensor | None = None
    """The sum of -log_probs, divided by `num_items_in_batch` or the number of tokens that count."""
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    """In nats."""


def make_exact(
    model: torch.nn.Module, engine: Engine | AsyncEngine | str | os.PathLike[str], *, temperature: float = 1.0,
    config: EngineConfig | None = None,
) -> ExactModel:  # fmt: skip
    """Give `model`, a causal language model of transformers or of PEFT around one, the values of an engine's layers.

    Its forward is changed in place until `close`. `engine`: the one that samples, of which the form of the layers is
    taken, or a model's path, loaded as `config` says. Weights are the model's in either case. `temperature`: that of
    sampling, by which log-probabilities are scored. Blocking.

    Raises `UnsupportedModel` with the reason where a trainer cannot have the engine's bits (a GPU, products of torch's,
    rounded weights), or where its layers do not compute what the engine's do.
    """
    temperature = as_number("temperature", temperature, 0.0, 100.0, exclusive_low=True)
    layers = _layers_of(engine, config)
    try:
        return ExactModel(model, layers, temperature)
    except BaseException:
        layers.close()
        raise


def _layers_of(engine: Engine | AsyncEngine | str | os.PathLike[str], config: EngineConfig | None) -> ExactLayers:
    if isinstance(engine, (str, os.PathLike)):
        config = config or EngineConfig(show_progress=False)
        decoder: Any = load_model(os.fspath(engine), config).model
        _refuse(why_not_exact(decoder))
        return ExactLayers(decoder, config)
    if not isinstance(engine, (Engine, AsyncEngine)):
        raise InvalidParameter("engine", "must be an Engine, an AsyncEngine, or a model's path", engine)
    if config is not None:
        raise InvalidParameter("config", "is the engine's own; give one with a path", config)
    core = (engine.aengine if isinstance(engine, Engine) else engine).core
    decoder = getattr(getattr(getattr(core.loop, "runner", None), "executor", None), "model", None)
    _refuse(why_not_exact(decoder, core.info.batch_variance))
    return ExactLayers.like(decoder, core.config)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedModel(f"a trainer cannot have this engine's bits: {reason}")


class _Run:
    """One forward: the engine's hidden states, which the trainer's modules take one after the other."""

    def __init__(
        self, sequences: Sequences, kept: list[torch.Tensor], errors: list[float] | None = None,
        routes: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """`errors`: list that gets each layer's relative error, if not None. `routes`: for each layer with experts, the
        experts of the tokens, [T, experts of a token]."""
        self.sequences, self.errors = sequences, errors
        self._routes = iter(routes)
        self.kept: list[torch.Tensor | None] = list(kept)

    def take(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """[R, longest, width]: the residual stream before layer `index`, which is then forgotten."""
        kept, self.kept[index] = self.kept[index], None
        if kept is None or like.shape[:2] != (len(self.sequences.counts), self.sequences.counts.max()):
            raise UnsupportedModel("the model does not call its layers one after the other, each with all tokens")
        return self.sequences.aligned(kept, like.dtype)

    def replaying(self, layer: DecoderLayer, forward: Any) -> Any:
        """transformers' `forward` of a layer, made to use the experts that the engine's layer chose. Called once for
        each layer, in order."""
        if not layer.mixtures():
            return forward
        experts, chosen = layer.mixtures()[0].router.config.experts, self.sequences.aligned(next(self._routes))

        def routed(*args: Any, **kwargs: Any) -> Any:
            with RoutingReplay(experts, chosen):
                return forward(*args, **kwargs)

        return routed


class ExactModel:
    """A transformers model with the engine's values, as `make_exact` leaves it. One forward at a time.

    `model(input_ids, attention_mask)` has the engine's logits, in float32; called as TRL does, with
    `fused_lm_head=True` and labels, it gives `TokenScores`. Parameters that have changed are noticed before each
    forward (not those that were written through `.data`: call `sync`). It takes the memory of the engine's form of the
    weights, and of the hidden states before each layer, as gradient checkpointing does.
    """

    def __init__(self, model: Any, layers: ExactLayers, temperature: float) -> None:
        """Use `make_exact`."""
        self.model, self.temperature = model, temperature
        self.base = base_of(model)
        self._layers, self._config = layers, layers.decoder.config
        self._modules = self._find_layers()
        self._run: Any = None
        self._weights: Any = None
        self._adapter: Any = None
        self._adapted = False
        self._tuples = [False] * len(self._modules)
        """Layers that give their result in a tuple."""
        self.sync()
        # fused optimizers change tensors without raising `_version`, which `versions_of` reads
        self._unhook = register_optimizer_step_post_hook(self._stepped)
        self._before = [(module, module.__dict__.get("forward")) for module in (*self._modules, self.base)]
        for index, module in enumerate(self._modules):
            module.forward = functools.partial(self._layer, index, module.forward)
        exact, original = self._forward, self.base.forward

        @functools.wraps(type(self.base).forward)
        def forward(_: Any, *args: Any, **kwargs: Any) -> Any:
            return exact(original, *args, **kwargs)

        self.base.forward = MethodType(forward, self.base)
        try:
            self._check_layers()
        except BaseException:
            self.close()
            raise

    def sync(self) -> None:
        """Give the layers the model's weights, and those of the adapter that is on, changed or not."""
        self._weights = self._adapter = None
        self._refresh()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the weights that an optimizer's step has changed. Called for every optimizer of this process."""
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.base.named_parameters():
            if id(parameter) in stepped and ".lora_" in name:
                self._adapter = None
            elif id(parameter) in stepped:
                self._weights = None

    def _refresh(self) -> None:
        """Take weights and adapter from the model if they have changed since the last forward."""
        weights = versions_of(self.base, adapters=False)
        if weights != self._weights:
            self._layers.update(exact_weights(self.base))
            self._weights = weights
        name = adapter_on(self.model)
        self._adapted = name is not None
        adapter = (name, versions_of(self.base, adapters=True))
        if name is not None and adapter != self._adapter:
            tensors, config, rank = take_adapter(self.model, name)
            read = functools.partial(PeftLoader, dtype=self._layers.decoder.dtype, max_rank=rank)
            self._layers.take_adapter(lambda modules: read(modules).take("trainer", tensors, config), rank)
            self._adapter = adapter

    # ---------------------------------------------------------------- scores

    def token_logprobs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 [B, S - 1]: the log-probability of each token after the first, as the engine reports it with
        `logprobs_of="sampled"` at this temperature where nothing is truncated or penalised.

        `labels`: input_ids with `IGNORED` at tokens that are not to be scored, whose score is 0; None: all but padding.
        Logits are computed, and again in the backward pass, for some tokens at a time.
        """
        return self._score(input_ids, attention_mask, labels, entropy=False)[0]

    def _score(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor | None, entropy: bool
    ) -> Outputs:
        labels = input_ids if labels is None else labels
        if labels.shape != input_ids.shape:
            raise InvalidParameter("labels", "must have the shape of input_ids", tuple(labels.shape))
        sequences, values, hidden = self._hidden(input_ids, attention_mask)
        targets = labels.flatten()[sequences.indices]
        wanted = ((sequences.positions[1:] > 0) & (targets[1:] != IGNORED)).nonzero()[:, 0]
        out = [torch.zeros(input_ids.numel()) for _ in range(1 + entropy)]
        for rows in torch.split(wanted, max(_BLOCK_ELEMENTS // self._layers.decoder.vocab_size, 1)):
            score = self._score_rows(values[rows], None if hidden is None else hidden[rows], targets[rows + 1], entropy)
            out = [whole.index_copy(0, sequences.indices[rows], part) for whole, part in zip(out, score, strict=True)]
        return tuple(whole.view(input_ids.shape)[:, :-1] for whole in out)

    def _score_rows(
        self, values: torch.Tensor, hidden: torch.Tensor | None, targets: torch.Tensor, entropy: bool
    ) -> Outputs:
        """(log-probabilities of `targets`, and entropies if wanted) of hidden states, as `_hidden` has them."""
        divisor = torch.full((len(targets), 1), self.temperature)

        def scores(logits: torch.Tensor, chosen: Callable[[torch.Tensor], torch.Tensor]) -> Outputs:
            scaled = logits / divisor  # as the sampler does: a product with the inverse has other bits
            if not entropy:
                return (chosen(scaled),)
            every = scaled.log_softmax(-1)
            return chosen(scaled), -(every.exp() * every).sum(-1)

        def again(inputs: Any) -> Outputs:
            return scores(self._head(inputs[0]), lambda x: x.log_softmax(-1).gather(1, targets[:, None])[:, 0])

        with torch.no_grad():
            logits = self._layers.logits(values, self._adapted)
            made = scores(logits, lambda rows: token_logprobs(rows, targets, 0).logprobs)
        return made if hidden is None else recomputed(again, made, (hidden,), self._head_parameters())

    # ---------------------------------------------------------------- forward

    def _forward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. With a cache it is transformers' own: `generate` is not exact."""
        if kwargs.get("use_cache") or kwargs.get("cache", kwargs.get("past_key_values")) is not None:
            with self._during(_ORIGINAL):
                return original(*args, **kwargs)
        return self._exact_forward(*args, **kwargs)

    def _exact_forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *,
        labels: torch.Tensor | None = None, fused_lm_head: bool = False, logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: Any = None, return_dict: bool = True, **options: Any,
    ) -> ModelOutput:  # fmt: skip
        refused = next((name for name, value in options.items() if value is not None and value is not False), None)
        if refused == "output_router_logits":
            off = "router_aux_loss_coef=0.0 in TRL's arguments leaves out the loss that is made of them"
            raise InvalidParameter(refused, f"are nothing that an exact forward makes: {off}")
        if refused is not None or not return_dict:
            raise InvalidParameter(refused or "return_dict", "is nothing that an exact forward knows")
        if fused_lm_head:
            if labels is None:
                raise InvalidParameter("labels", "are needed with fused_lm_head")
            log_probs, entropy = self._score(input_ids, attention_mask, labels, entropy=True)
            counted = num_items_in_batch or (labels[:, 1:] != IGNORED).sum().clamp(min=1)
            return TokenScores(loss=-log_probs.sum() / counted, log_probs=log_probs, entropy=entropy)
        logits = self._logits(input_ids, attention_mask, logits_to_keep)
        loss = None
        if labels is not None:
            counts = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            loss = self.base.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **counts)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _logits(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, keep: int | torch.Tensor
    ) -> torch.Tensor:
        """float32 [B, S, vocab], or of the positions that transformers' `logits_to_keep` names; 0 at padding."""
        sequences, values, hidden = self._hidden(input_ids, attention_mask)
        chosen = slice(-keep, None) if isinstance(keep, int) else keep
        wanted = torch.zeros_like(input_ids, dtype=torch.bool)
        wanted[:, chosen] = True
        rows = wanted.flatten()[sequences.indices].nonzero()[:, 0]
        logits = self._layers.logits(values[rows], self._adapted)
        if hidden is not None:
            source, parameters = hidden[rows], self._head_parameters()
            (logits,) = recomputed(lambda inputs: (self._head(inputs[0]),), (logits,), (source,), parameters)
        out = torch.zeros((input_ids.numel(), logits.shape[-1])).index_copy(0, sequences.indices[rows], logits)
        return out.view(*input_ids.shape, -1)[:, chosen]

    def _hidden(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[Sequences, torch.Tensor, torch.Tensor | None]:
        """(the sequences, the engine's hidden states [T, width] behind the last norm, the same with gradients, or None
        if none are needed)."""
        self._check_dropout()
        decoder = self._layers.decoder
        sequences = read_sequences(input_ids, attention_mask, decoder.input_vocab_size, decoder.max_model_len)
        self._refresh()
        if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.base.parameters()):
            return sequences, self._layers.forward(sequences, self._adapted), None
        kept: list[torch.Tensor] = []
        routes: list[torch.Tensor] = []
        values = self._layers.forward(sequences, self._adapted, kept, routes)
        last = self._walk(_Run(sequences, kept, routes=routes))
        return sequences, values, replaced(sequences.flat(last), values.to(last.dtype))

    def _walk(self, run: _Run) -> torch.Tensor:
        """Run transformers' own forward, whose layers take their values from `run`. Returns its last hidden states."""
        with self._during(run):
            last: torch.Tensor = self.base.base_model(
                input_ids=run.sequences.aligned(run.sequences.ids), use_cache=False
            ).last_hidden_state
        if any(kept is not None for kept in run.kept):
            raise UnsupportedModel("the model left out one of its layers")
        return last

    def _layer(self, index: int, original: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The forward of layer `index`."""
        run = self._run
        if run is None:
            reason = "its forward was replaced after make_exact: make a model exact once its trainer has been made"
            raise UnsupportedModel(f"the model's layers are called past the exact forward: {reason}")
        if run is _ORIGINAL:
            return original(hidden_states, *args, **kwargs)
        if index == 0:
            hidden_states = replaced(hidden_states, run.take(0, hidden_states))
        value = run.take(index + 1, hidden_states)
        if run.errors is not None:
            output = original(hidden_states, *args, **kwargs)
            self._tuples[index] = isinstance(output, tuple)
            output = output[0] if self._tuples[index] else output
            wide = [run.sequences.flat(states).float() for states in (output, value, hidden_states)]
            share = (wide[0] - wide[1]).norm(dim=-1) / (wide[1] - wide[2]).norm(dim=-1).clamp(min=1e-6)
            run.errors.append(float(share.median()))  # not the mean: a router may choose otherwise at a few tokens
        elif torch.is_grad_enabled():
            again = run.replaying(self._layers.decoder.layers[index], original)
            value = recomputed_module(self._modules[index], again, value, (hidden_states, *args), kwargs)
        return (value,) if self._tuples[index] else value

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """transformers' own logits [N, vocab] of hidden states [N, width], in float32."""
        logits: torch.Tensor = self.base.get_output_embeddings()(hidden).float() * self._config.logit_scale
        cap = self._config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _head_parameters(self) -> list[torch.Tensor]:
        return [parameter for parameter in self.base.get_output_embeddings().parameters() if parameter.requires_grad]

    # ---------------------------------------------------------------- checks and the end

    def _find_layers(self) -> list[Any]:
        """The trainer's decoder layers. Raises `UnsupportedModel` for a model of other names, types or devices."""
        dtype = self._layers.decoder.dtype
        for name, param in self.base.named_parameters():
            if param.dtype not in (dtype, torch.float32) or param.device.type != "cpu":
                raise UnsupportedModel(
                    f"the engine computes in {dtype} on a CPU; the model has {name} in {param.dtype} on {param.device}"
                )
        try:
            indices = range(len(self._config.layers))
            return [self.base.get_submodule(self._config.layer.format(index).rstrip(".")) for index in indices]
        except AttributeError as error:
            raise UnsupportedModel(f"the model has no layer where the engine expects it: {error}") from None

    def _check_dropout(self) -> None:
        """Raises `UnsupportedModel` for a module in training with dropout, which the engine does not have."""
        for name, module in self.base.named_modules() if self.base.training else ():
            fields = ("p",) if isinstance(module, torch.nn.Dropout) else ("attention_dropout", "dropout")
            for share in (getattr(module, field, 0.0) for field in fields):
                if isinstance(share, float) and share > 0:
                    raise UnsupportedModel(f"an exact forward drops nothing: the dropout of {name} is {share}, not 0")

    def _check_layers(self) -> None:
        """Raises `UnsupportedModel` if a layer of transformers' does not compute what the engine's does."""
        vocab, errors = self._layers.decoder.input_vocab_size, list[float]()
        sequences = read_sequences(torch.arange(1, 17)[None] * 7 % vocab, None, vocab, 16)
        kept: list[torch.Tensor] = []
        training = self.base.training
        self.base.eval()
        try:
            with torch.no_grad():
                self._layers.forward(sequences, self._adapted, kept)
                self._walk(_Run(sequences, kept, errors))
        finally:
            self.base.train(training)
        for index, error in enumerate(errors):
            if not error < _UNLIKE:
                why = f"layer {index} of the model is not what the engine computes: relative error {error:.2g}"
                raise UnsupportedModel(why)

    @contextmanager
    def _during(self, run: Any) -> Iterator[None]:
        before, self._run = self._run, run
        try:
            yield
        finally:
            self._run = before

    def close(self) -> None:
        """Give the model its own forward back, and end the threads. Idempotent."""
        for module, before in self._before:
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        self._before = []
        self._unhook.remove()
        self._layers.close()
