"""lm-evaluation-harness over an engine of this process: importing this module registers the model "asyncengine".

The harness finds models by import alone: `python -m asyncengine.integrations.evaluation.lm_eval` is its command line
with this one among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from asyncengine import Completion, SamplingParams, shared_engine


@register_model("asyncengine")
class AsyncEngineLM(TemplateLM):  # type: ignore[misc]
    """The harness' model. Scores do not depend on `batch_size` if the engine is batch invariant (see its `info`)."""

    def __init__(
        self, pretrained: str = "demo", batch_size: int | str = "auto", max_batch_size: int | None = None,
        adapter: str | None = None, max_gen_toks: int = 256, device: str = "cuda:0", **settings: Any,
    ) -> None:  # fmt: skip
        """`pretrained`: a folder, a hub id or a bundled model. `batch_size`: requests that run at a time
        (`max_num_seqs`); "auto": the engine's own. `adapter`: one of `adapters`, which all requests use.
        `max_gen_toks`: tokens of an answer whose task sets no limit. `settings`: fields of `EngineConfig`.

        Raises what loading the model raises.
        """
        super().__init__()
        settings["device"] = "auto" if device == "cuda:0" else device  # "cuda:0" is the harness' default
        size = max_batch_size if str(batch_size).startswith("auto") else int(batch_size)
        self._handle = shared_engine(pretrained, **(settings | {"max_num_seqs": size} if size else settings))
        self.engine, self._adapter, self._max_gen_toks = self._handle.get(), adapter, max_gen_toks
        self._front = self.engine.tokenize("")[:1]

    @property
    def eot_token_id(self) -> int:
        return self.engine.info.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the one that the tokenizer puts first, else end of sequence."""
        return self._front[0] if self._front else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self.engine.info.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return self.engine.info.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        tokenizer: Any = self.engine.core.tokenizer
        flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(tokenizer.render_chat(chat_history, **flags))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self.engine.tokenize(string, add_special_tokens=add_special_tokens)
        return ids[1:] if self._front and ids[:2] == self._front * 2 else ids  # a chat template has written it, too

    def _completions(self, requests: Iterable[tuple[list[int], SamplingParams]]) -> Iterator[Completion]:
        """Completions in order; all are submitted before any is awaited."""
        streams = [self.engine.stream(ids, params, adapter=self._adapter) for ids, params in requests]
        return (stream.result() for stream in streams)

    def _scores(self, requests: Sequence[Sequence[list[int]]]) -> Iterator[tuple[float, bool]]:
        """For each (context, continuation): log-probability of the continuation, and whether each of its tokens is the
        likeliest. Pairs beyond `max_length` lose their beginning."""
        prompts = [(context + more)[-self.max_length :] for context, more in requests]
        starts = [max(1, len(ids) - len(more)) for ids, (_, more) in zip(prompts, requests, strict=True)]
        params = (SamplingParams(max_tokens=0, prompt_logprobs_start=start, top_logprobs=1) for start in starts)
        for completion, start in zip(self._completions(zip(prompts, params, strict=True)), starts, strict=True):
            scored = [entry for entry in (completion.prompt_logprobs or [])[start:] if entry is not None]
            yield sum(entry.logprob for entry in scored), all(entry.top[0][0] == entry.token_id for entry in scored)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        scores = []
        for (key, *_ids), score in zip(requests, self._scores([pair for _, *pair in requests]), strict=True):
            self.cache_hook.add_partial("loglikelihood", key, score)
            scores.append(score)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        cut = partial(get_rolling_token_windows, prefix_token=self.prefix_token_id, context_len=1)
        windows = [[make_disjoint_window(pair) for pair in cut(ids, max_seq_len=self.max_length - 1)] for ids in texts]
        scores = self._scores([pair for text_windows in windows for pair in text_windows])
        return [sum(next(scores)[0] for _ in text_windows) for text_windows in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = []
        prompts = (self._prompt(number, *request.args) for number, request in enumerate(requests))
        for request, completion in zip(requests, self._completions(prompts), strict=True):
            self.cache_hook.add_partial("generate_until", request.args, completion.text)
            texts.append(completion.text)
        return texts

    def _prompt(self, number: int, context: str, keywords: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """Prompt and parameters of a generation; `number` is its seed. Raises `InvalidParameter` for keywords that are
        no sampling parameters."""
        options: dict[str, Any] = {"seed": number, **normalize_gen_kwargs(keywords, self._max_gen_toks)}
        most, stop = options.pop("max_gen_toks"), [text for text in options.pop("until", ()) if text]
        options.setdefault("temperature", 1.0 if options.pop("do_sample") else 0.0)
        ids = self.tok_encode(context)[-max(1, self.max_length - most) :]
        return ids, SamplingParams.from_dict({**options, "max_tokens": most, "stop": stop})


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
