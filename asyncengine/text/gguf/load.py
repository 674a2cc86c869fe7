"""The engine's tokenizer of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncengine.text.gguf.build import tokenizer_from_gguf
from asyncengine.text.gguf.harmony import channel_template
from asyncengine.text.tokenizer import MAX_CHAT_CHARS, TextTokenizer


def load_gguf_tokenizer(
    metadata: Mapping[str, Any], *, max_chat_chars: int = MAX_CHAT_CHARS, chat_template: str | None = None
) -> TextTokenizer:
    """The tokenizer, the chat templates and the end-of-turn ids that a GGUF header holds.

    `chat_template` replaces the header's own; gpt-oss gets one where its header has none. Raises what
    `tokenizer_from_gguf` raises.
    """
    from transformers import PreTrainedTokenizerFast

    built = tokenizer_from_gguf(metadata)
    header = built.header
    templates = header.chat_templates
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=_HandedOver(built.backend),
        bos_token=header.name_of("bos"),
        eos_token=header.name_of("eos"),
        unk_token=header.name_of("unk"),
        chat_template=(templates["default"] if templates.keys() == {"default"} else templates)
        or channel_template(header),
        clean_up_tokenization_spaces=False,
    )
    return TextTokenizer(
        wrapped, max_chat_chars=max_chat_chars, chat_template=chat_template, end_token_ids=built.end_ids
    )


class _HandedOver:
    """A tokenizer given away: transformers copies what it is given, which takes as long as building it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Any:
        return self._backend
