"""Decisions: typed questions about a state, answered with the probabilities of their options and no text.

Questions, labels, temperatures, prompts and answers are those of `transformers.decision`. Each question is a prompt
whose next token is the label of an option; all prompts of a call begin with the same state, so that its keys and values
are computed once. Labels are compared by their token ids: a grammar would also admit other spellings of them, to which
models give a percent or two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncengine.engine.image_prompts import ImagePrompts
from asyncengine.errors import InvalidParameter, RequestFailed, UnsupportedModel
from asyncengine.images import ImageSpan
from asyncengine.options import RequestOptions
from asyncengine.outputs import Completion, Decision, DecisionAnswer
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.text.media import PARTS
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from transformers.decision.template_utils import Question

    from asyncengine.engine.frontend import Frontend
    from asyncengine.engine.validation import PreparedRequest

MAX_QUESTIONS = 1000
"""Questions of one call, as in the largest of the services that take them."""
MARK, SPLIT = "<|mark|>", "<|split|>"
"""Sentinels of decision templates: where an answer is read, and between texts that must not grow together."""
_BREAK, _PICTURE = "\ufdd0", "\ufdd1"
"""Characters that stand for no text (Unicode's noncharacters): one parts the names of control tokens in a caller's
text, which is encoded in pieces there, and between two of the other stands the number of a picture."""


class DecisionPrompts:
    """Makes the prompts of one model's decisions. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, max_tokens: int, images: ImagePrompts | None = None) -> None:
        """`max_tokens`: of a prompt. `images`: of a model that reads pictures. Raises `UnsupportedModel` without a
        transformers that knows decisions, and for files of the model that it cannot read."""
        self._tokenizer, self._max_tokens, self._images = tokenizer, max_tokens, images
        try:
            # not from the package itself: several threads that import it first may find it half made
            from transformers.decision.configuration_utils import DecisionConfig
            from transformers.decision.template_utils import DECISION_PROMPT

            folder = tokenizer.folder if tokenizer.folder is not None and tokenizer.folder.is_dir() else None
            self._config = DecisionConfig.from_pretrained(folder or "")
        except ImportError as error:
            raise UnsupportedModel("decisions need transformers 5.24 or newer") from error
        except Exception as error:  # a file that is no JSON, or has other types in it
            raise UnsupportedModel(f"decision.json of the model cannot be read: {error}") from error
        self._general: str = DECISION_PROMPT
        self._head = None if folder is None else _head_of(folder, self._config.adapter)

    def questions(self, questions: object) -> list[Question]:
        """The questions of a call, {name: {"type", "instructions", "criteria"}}, or objects with `model_dump` in place
        of the inner dicts (LangChain's), checked. Raises `InvalidParameter`."""
        from transformers.decision.template_utils import parse_questions

        if not isinstance(questions, Mapping) or not 0 < len(questions) <= MAX_QUESTIONS:
            raise InvalidParameter("questions", f"must map names to questions, 1 to {MAX_QUESTIONS} of them", questions)
        plain = {name: q.model_dump() if hasattr(q, "model_dump") else q for name, q in questions.items()}
        try:
            return list(parse_questions(plain, self._config))
        except ValueError as error:
            raise InvalidParameter("questions", str(error)) from error

    def prompt(self, state: Any, question: Question, pictures: Pictures) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Token ids of the prompt of `question` about a `state` from `parted`, and the pictures among them. Raises
        `InvalidParameter`, `UnsupportedModel`, and `ContextLengthExceeded` for a text that is far too long."""
        fields = ("instructions", "options", "descriptions")
        parts = {name: self.parted(getattr(question, name), pictures) for name in fields}
        asked = {"name": question.name, "type": question.type, "labels": list(question.labels), **parts}
        variables = {"state": state, "question": asked}
        template = self._config.chat_template
        empty = [{"role": "user", "content": ""}]
        text = self._tokenizer.render_chat(empty, template=template or self._general, **variables)
        shown, collected = pictures.blocks(text), None if self._images is None else self._images.parts()
        names = [block.get("where", "state") for block in shown if block["type"] != "text"]
        if names and (template is not None or collected is None):
            who = "this model reads" if template is None else "the decision template of this model takes"
            raise InvalidParameter(names[0], f"is a picture, and {who} none")
        if template is None:
            supported = "enable_thinking" in self._tokenizer.template_variables()
            thinking: dict[str, Any] = {"enable_thinking": False} if supported else {}
            chat = [{"role": "user", "content": shown if names else text}]
            text = self._tokenizer.render_chat(chat, images=collected, **thinking)
        text, _, behind = text.partition(MARK)
        if MARK in behind:
            raise UnsupportedModel("its decision template reads answers at several positions, and one is read here")
        self._tokenizer.check_fits("state", text, self._max_tokens)
        if self._images is None or collected is None or not names:
            return self._encode(text), ()
        pairs = zip(collected.parts, names, strict=True)
        return self._images.encode(text, [replace(part, name=name) for part, name in pairs], self._encode)

    def _encode(self, text: str) -> list[int]:
        pieces = text.replace(SPLIT, _BREAK).split(_BREAK)
        return [token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)]

    def params(self, question: Question) -> SamplingParams:
        """Parameters by which the answer to `question` is read. Raises `InvalidParameter`."""
        if self._head is not None:
            labels = self._head[question.type][: len(question.options)]
            problem = f"has more options than the head of this model scores: {len(labels)} of this type"
        else:
            ids = [self._tokenizer.encode(label, add_special_tokens=False) for label in question.labels]
            labels = tuple(tokens[0] for tokens in ids if len(tokens) == 1)
            problem = f"has labels that are not distinct single tokens of this model: {', '.join(question.labels)}"
        if len(set(labels)) != len(question.options):
            raise InvalidParameter(f"questions[{question.name!r}]", problem)
        return SamplingParams(
            max_tokens=1, temperature=float(self._config.temperature.get(question.type, 1.0)), top_p=1.0, top_k=0,
            min_p=0.0, repetition_penalty=1.0, seed=0, ignore_eos=True, allowed_token_ids=labels,
            top_logprobs=len(labels), logprobs_of="sampled",
        )  # fmt: skip

    @cached_property
    def _control(self) -> re.Pattern[str]:
        """The names of all added tokens, and of the sentinels."""
        hf = self._tokenizer.backend or self._tokenizer.hf
        added = hf.get_added_tokens_decoder() if hasattr(hf, "get_added_tokens_decoder") else hf.added_tokens_decoder
        names = {token.content for token in added.values() if len(token.content.strip()) > 1} | {MARK, SPLIT}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    def parted(self, value: Any, pictures: Pictures) -> Any:
        """JSON data with the names of control tokens in its texts parted, and the places of `pictures`."""
        if isinstance(value, str):
            text = pictures.placed(value.replace(_BREAK, "").replace(_PICTURE, ""))
            while self._control.search(text):  # a name may hold another one
                text = self._control.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)
            return text
        if isinstance(value, Mapping):
            if value.get("type") in PARTS and value["type"] in value:  # else it is data that has a type
                return pictures.add(value)
            return {self.parted(key, pictures): self.parted(item, pictures) for key, item in value.items()}
        return [self.parted(item, pictures) for item in value] if isinstance(value, (list, tuple)) else value


class Pictures:
    """Pictures of one call: content parts anywhere in its state or questions, and assets that texts name."""

    def __init__(self, assets: Mapping[str, Any]) -> None:
        """`assets`: pictures by the names that stand for them in texts (transformers'). Raises `InvalidParameter`."""
        if not isinstance(assets, Mapping) or not all(isinstance(name, str) and name for name in assets):
            raise InvalidParameter("assets", "must map names to pictures", assets)
        self._parts: list[Mapping[str, Any]] = []
        parts = {name: {"type": "image", "image": item, "where": f"assets[{name!r}]"} for name, item in assets.items()}
        marks = {name: self.add(part) for name, part in parts.items()}
        names = re.compile("|".join(map(re.escape, sorted(assets, key=len, reverse=True))) or "(?!)")
        self.placed: Callable[[str], str] = partial(names.sub, lambda match: marks[match[0]])
        """Makes of a text one with the places of the assets that it names."""

    def add(self, part: Mapping[str, Any]) -> str:
        """Keep a content part, whose `where` names it in errors; returns what stands in its place."""
        self._parts.append(part)
        return f"{_PICTURE}{len(self._parts) - 1}{_PICTURE}"

    def blocks(self, text: str) -> list[Mapping[str, Any]]:
        """The text as content parts, with the pictures whose places it holds."""
        pieces = re.split(f"{_PICTURE}([0-9]+){_PICTURE}", text)
        blocks = [self._parts[int(one)] if i % 2 else {"type": "text", "text": one} for i, one in enumerate(pieces)]
        return [block for block in blocks if block.get("text") != ""]


class DecisionCall:
    """One call of `decide`."""

    def __init__(
        self, frontend: Frontend, state: Any, questions: object, assets: Mapping[str, Any] | None,
        options: RequestOptions,
    ) -> None:  # fmt: skip
        self._frontend, self._state, self._questions, self._options = frontend, state, questions, options
        self._pictures = Pictures({} if assets is None else assets)
        self._asked: list[Question] = []
        self._specs: list[RequestSpec] = []

    def prepare(self, arrival: float | None = None) -> PreparedRequest:
        """The one request that asks all questions. Raises `InvalidParameter`, `UnsupportedModel` and what
        `Frontend.prepare` raises."""
        frontend, prompts = self._frontend, self._frontend.decision_prompts()
        try:
            state = prompts.parted(self._state, self._pictures)
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidParameter("state", f"must be text or JSON data: {error}") from error
        self._asked = prompts.questions(self._questions)
        items = [
            (*prompts.prompt(state, question, self._pictures), prompts.params(question)) for question in self._asked
        ]
        arrival = frontend.loop.clock.now() if arrival is None else arrival
        prepared = frontend.validator.prepare_set(items, self._options, arrival)
        self._specs = prepared.specs
        return prepared

    def decision(self, completion: Completion) -> Decision:
        """The answers in the finished request, a sample each. Raises `RequestFailed` where one has none: a deadline or
        an abort came first."""
        answers = {}
        for question, spec, sample in zip(self._asked, self._specs, completion.samples, strict=True):
            if not sample.logprobs:
                limit = f"ended with reason {sample.finish_reason!r}" + (f": {sample.error}" if sample.error else "")
                raise RequestFailed(f"request {completion.request_id}: question {question.name!r} {limit}")
            by_token = {alternative.token_id: math.exp(alternative.logprob) for alternative in sample.logprobs[0].top}
            numbers = [by_token[token] for token in spec.params.allowed_token_ids or ()]
            by_option = dict(zip(question.options, numbers, strict=True))
            best = max(by_option, key=lambda option: by_option[option])
            details = question.answer(numbers)
            value = float(details.get("noul", details.get("score", by_option[best])))
            answers[question.name] = DecisionAnswer(question.type, value, best, by_option, details)
        return Decision(answers, completion.usage, completion.timings, completion.request_id)


def _head_of(folder: Path, adapter: str | None) -> dict[str, tuple[int, ...]] | None:
    """Rows of the head of transformers' `JevForDecision` by type of question, which are tokens here; None: labels are
    compared. Raises `UnsupportedModel` for a model whose adapter or head lies in files of its own."""
    if adapter is not None:
        raise UnsupportedModel(f"decision.json names the LoRA adapter {adapter!r}: merge it, and name none there")
    if (folder / "head.safetensors").is_file() or (folder / "readout.safetensors").is_file():
        raise UnsupportedModel("its decision head lies beside its weights: JevForDecision's save_pretrained joins them")
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if content.get("model_type") != "jev":
        return None
    offsets = content.get("offsets") or {"noul": 0, "score": 2, "choice": 8}
    return {name: tuple(range(first, content.get("num_verbalizers", 24))) for name, first in offsets.items()}
