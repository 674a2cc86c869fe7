"""The engine's view of a model's tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from asyncengine import errors
from asyncengine.checks import check_unicode
from asyncengine.config import CHAT_TEMPLATES, ModelSettings
from asyncengine.text.chat_template import PROBE_CHAT, PROBE_TOOL, ChatTemplate, Rewrite
from asyncengine.text.media import ImageParts
from asyncengine.text.plain_tokenizer import read_plain_tokenizer
from asyncengine.text.token_table import SAMPLES, TokenTable, table_of

MAX_CHAT_CHARS = 4_000_000
ENCODED_AT_ONCE = 4096
"""Characters of a text that takes a millisecond, below which releasing the interpreter's lock is not worth its cost."""
_NORMALIZED = 4
"""A character can stand for several (a letter and its accents), or for none."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
)  # fmt: skip
"""A folder with none of these (and no *.tiktoken) has no tokenizer."""


class TextTokenizer:
    """Encodes, decodes and renders chats with a tokenizer: transformers', or a `PlainTokenizer` in its place. All
    methods may be called from any thread.

    `max_chat_chars` bounds a chat, both what goes into the template and what comes out. `chat_template` replaces the
    model's own; it is code, though sandboxed, so it is the host's to give, never a request's. `end_token_ids` are the
    ids that end an answer, where something tells more of them than the tokenizer does (a GGUF header). `load_hf` gives
    the transformers tokenizer of the same files, where `tokenizer` is none. `folder` is the model's, if it has one.
    """

    def __init__(
        self, tokenizer: Any, *, max_chat_chars: int = MAX_CHAT_CHARS, chat_template: str | None = None,
        end_token_ids: Sequence[int] = (), load_hf: Callable[[], Any] | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._hf = tokenizer
        self._load_hf = load_hf
        self.folder = folder
        self._end_token_ids = tuple(end_token_ids)
        self._max_chat_chars = max_chat_chars
        self._chat_template = chat_template
        self._lock = threading.Lock()
        self._templates: dict[str, ChatTemplate] = {}
        self._table: TokenTable | None = None
        self._loaded_hf: Any = None
        self.backend: Any | None = self._direct_backend()
        """The Rust tokenizer, where using it directly gives the same ids. Do not change its settings."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tokenizer and settings alone: the other process makes locks, tables and templates anew."""
        make = partial(
            TextTokenizer, max_chat_chars=self._max_chat_chars, chat_template=self._chat_template,
            end_token_ids=self._end_token_ids, load_hf=self._load_hf, folder=self.folder,
        )  # fmt: skip
        return make, (self._hf,)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's own vocabulary may be padded to more."""
        return len(self._hf)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id. The model's generation config may name more."""
        return self._hf.eos_token_id

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that the tokenizer's files name as an answer's end. The generation config may name more."""
        eos = self.eos_token_id
        return self._end_token_ids or (() if eos is None else (eos,))

    @property
    def bos_token_id(self) -> int | None:
        return self._hf.bos_token_id

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_template or getattr(self._hf, "chat_template", None))

    @property
    def hf(self) -> Any:
        """The transformers tokenizer itself, for libraries that want one. Do not change its settings.

        The first use may have to import transformers and to read the files again.
        """
        if self._load_hf is None:
            return self._hf
        with self._lock:
            if self._loaded_hf is None:
                self._loaded_hf = self._load_hf()
            return self._loaded_hf

    def get_vocab(self) -> dict[str, int]:
        """{token: id}, added tokens included."""
        return self._hf.get_vocab()

    @property
    def table(self) -> TokenTable:
        """The shared token table. The first use builds it (about a second for a large vocabulary)."""
        if self._table is None:
            with self._lock:
                if self._table is None:
                    self._table = table_of(self._hf)
        return self._table

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Names of special tokens in the text become those tokens.

        Raises `InvalidParameter` unless it is an encodable str (without lone surrogates).
        """
        if not isinstance(text, str):
            raise errors.InvalidParameter("prompt", "must be a str", text)
        check_unicode("prompt", text)
        if self.backend is not None:
            if len(text) > ENCODED_AT_ONCE:  # one text alone is encoded under the interpreter's lock, a batch is not
                (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            return encoding.ids
        with self._lock:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token's name, which is no shorter than its text."""
        return max(map(len, self.get_vocab()), default=1)

    def check_fits(self, field: str, text: str, most_tokens: int) -> None:
        """Raises `ContextLengthExceeded` for a text that is far too long for `most_tokens`, without encoding it."""
        if len(text) <= most_tokens:  # nearly every text: the first must not wait for a scan of the vocabulary
            return
        most = most_tokens * self.longest_token * _NORMALIZED
        if len(text) > most:
            limit = f"must not exceed {most} characters: {most_tokens} tokens (max_model_len) hold far fewer"
            raise errors.ContextLengthExceeded(field, limit, len(text))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids without a token (a padded vocabulary) have none."""
        ids = [token for token in token_ids if 0 <= token < self.table.size]
        return str(self._hf.decode(ids, skip_special_tokens=skip_special_tokens)) if ids else ""

    def render_chat(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, images: ImageParts | None = None, rewrite: Rewrite | None = None,
        template: str | None = None, **variables: Any,
    ) -> str:  # fmt: skip
        """The text of a chat in the OpenAI shape, for the model to answer (or to continue its last message). It is
        encoded without adding special tokens: the template writes them.

        Contents are strings or lists of text blocks; a tool call's arguments are JSON text or a dict, and reach the
        template in the form it reads. `images`: collects the chat's pictures, which are refused without. `rewrite`:
        makes of checked messages and tools those that the template gets. `template`: the text of one that takes the
        place of the model's. `variables` are template variables such as
        `enable_thinking`; one the template does not read does nothing.

        Names of special tokens inside message contents are encoded as those tokens, as in transformers, so content
        can imitate the template's markup; do not let the template be the only barrier between users and system text.
        Encoding contents apart from their surroundings would avoid that, but would change the tokens at every border,
        away from what models are trained on.

        Takes long for long chats: call it off the event loop. Raises `InvalidParameter`.
        """
        if continue_final_message and add_generation_prompt:
            raise errors.InvalidParameter("continue_final_message", "cannot go with add_generation_prompt")
        chosen = self._template(tools) if template is None else self._template_of(template)
        return chosen.render(
            messages, tools, max_chars=self._max_chat_chars, variables=variables, images=images, rewrite=rewrite,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
        )  # fmt: skip

    def warm_up(self) -> None:
        """Do now, off the event loop, what the first use would do: build the table, compile and probe the template."""
        self.table  # noqa: B018
        if self.has_chat_template:
            self._template(None)

    def template_variables(self) -> tuple[str, ...]:
        """Names of the chat template's variables that a caller may set; none where it cannot be read."""
        try:
            return tuple(self._template(None).settable) if self.has_chat_template else ()
        except errors.InvalidParameter:
            return ()

    def template_text(self, tools: object = None) -> str:
        """The chat template in force for a chat with `tools`. Raises `ValueError` where the tokenizer has none."""
        return str(self._chat_template or self._hf.get_chat_template(tools=tools or None))

    @property
    def reads_tools(self) -> bool:
        """The chat template takes tools. Raises `InvalidParameter` where there is none, or a broken one."""
        return self._template([PROBE_TOOL]).reads_tools

    @property
    def turn_end(self) -> str:
        """The mark that the chat template writes behind an answer; empty where it writes none."""
        text = self.render_chat(PROBE_CHAT, add_generation_prompt=False)
        return next(iter(text.rpartition(PROBE_CHAT[-1]["content"])[2].split()), "")

    def _template(self, tools: object) -> ChatTemplate:
        if not self.has_chat_template:
            limit = "this model has no chat template: load it with chat_template= (a text, a file, or a name such as "
            limit += f"{', '.join(map(repr, CHAT_TEMPLATES[:4]))}), or pass a prompt to generate"
            raise errors.InvalidParameter("messages", limit)
        try:
            text = self.template_text(tools)
        except ValueError as error:
            raise errors.InvalidParameter("messages", str(error)) from error
        return self._template_of(text)

    def _template_of(self, text: str) -> ChatTemplate:
        with self._lock:
            if text not in self._templates:
                self._templates[text] = ChatTemplate(self._hf, text)
            return self._templates[text]

    def _direct_backend(self) -> Any | None:
        """The Rust tokenizer, if using it directly gives the same ids.

        It encodes in parallel; the transformers wrapper changes settings on each call, which other threads' calls
        would then meet, so that one needs the lock.
        """
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            return None
        # transformers also switches off the truncation and padding a tokenizer.json may bring along, for good
        wrapped = [self._hf.encode(text, add_special_tokens=special) for text in SAMPLES for special in (False, True)]
        direct = [backend.encode(text, add_special_tokens=special).ids for text in SAMPLES for special in (False, True)]
        return backend if direct == wrapped else None


def load_tokenizer(
    path: str | Path, config: ModelSettings, *, max_chat_chars: int = MAX_CHAT_CHARS, model_config: Any = None,
    beside: Path | None = None,
) -> TextTokenizer | None:  # fmt: skip
    """The tokenizer in a model's folder or of a hub id; None for a folder without one (a token-id-only engine).

    `model_config`: the model's, where it has been read; None: transformers reads it, as it chooses by family.
    `beside`: the folder that a hub id was downloaded to, where a template may lie that transformers does not look for.

    Raises `ModelNotFound` if there is nothing or it cannot be read, `UnsupportedModel` if it needs code of its own and
    `trust_remote_code` is off.
    """
    folder = Path(path)
    has_files = any((folder / name).is_file() for name in TOKENIZER_FILES) or any(folder.glob("*.tiktoken"))
    if folder.is_dir() and not has_files:
        return None
    load_hf = partial(_load_hf, str(path), config.revision, config.trust_remote_code, model_config)
    try:
        tokenizer = plain = None if model_config is None else read_plain_tokenizer(folder, model_config.model_type)
        if plain is None:
            tokenizer = load_hf()
        own_template = getattr(tokenizer, "chat_template", None)
        return TextTokenizer(
            tokenizer, max_chat_chars=max_chat_chars, load_hf=None if plain is None else load_hf, folder=beside,
            chat_template=config.chat_template or (None if own_template else _template_beside(beside or folder)),
        )  # fmt: skip
    except BaseException as error:  # transformers raises many types for missing and broken files
        panicked = type(error).__name__ == "PanicException"  # inside the Rust library, but it is about one file only
        if isinstance(error, errors.EngineError) or not (isinstance(error, Exception) or panicked):
            raise
        if "trust_remote_code" in str(error):
            raise errors.UnsupportedModel(
                f"the tokenizer of {path} needs its own code: set trust_remote_code=True"
            ) from error
        raise errors.ModelNotFound(f"no usable tokenizer at {path}: {errors.shorten(str(error), 300)}") from error


def _load_hf(path: str, revision: str | None, trust_remote_code: bool, model_config: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        path, revision=revision, trust_remote_code=trust_remote_code, config=model_config
    )


def _template_beside(folder: Path) -> str | None:
    """The template of chat_template.json, where older models that read images keep it: transformers reads it for their
    processor, not for their tokenizer."""
    try:
        content = json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else None
