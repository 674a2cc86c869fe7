"""Many texts to token ids at once, cut to a length: what embedders and rerankers are given."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncengine.checks import check_unicode
from asyncengine.errors import InvalidParameter
from asyncengine.text.tokenizer import TextTokenizer

TextOrPair = str | tuple[str, str]
Frame = tuple[tuple[int, ...], tuple[int, ...]]
_LONG = 12
"""Characters to a token of the limit beyond which a text is taken for one that is too long: it is encoded without the
special tokens at once, and not a second time."""


class EncodedText(NamedTuple):
    """The model's input for a text or a pair of texts."""

    ids: list[int]
    second: int = 0
    """The index at which token type 1 begins; 0: there is none."""
    cut: bool = False
    """It was longer than the limit."""


class BatchTokenizer:
    """Encodes lists of texts, or of pairs, each cut to `max_length` tokens, special ones included. From any thread.

    Cutting is that of transformers: special tokens stay, and of a pair the longer text is cut first.
    """

    def __init__(
        self, tokenizer: TextTokenizer, max_length: int, lower_case: bool = False, frame: Frame | None = None
    ) -> None:
        """`lower_case`: the model wants texts in small letters, whatever its tokenizer does. `frame`: what stands
        before and behind each text, in place of the tokenizer's special tokens."""
        self.max_length = max_length
        self._frame = frame
        self._tokenizer = tokenizer
        self._hf = tokenizer.hf
        self._backend = tokenizer.backend
        self._side = getattr(self._hf, "truncation_side", "right")
        self._types = "token_type_ids" in getattr(self._hf, "model_input_names", ())
        self._lower_case = lower_case
        self._lock = threading.Lock()

    def prompt_length(self, prompt: str) -> int:
        """Tokens that `prompt` and what the tokenizer puts before it take; as sentence-transformers counts them."""
        ids = self.encode([prompt])[0].ids
        return len(ids) - (bool(ids) and ids[-1] in self._hf.all_special_ids)

    def encode(
        self, texts: Sequence[TextOrPair], name: str = "texts", indices: Sequence[int] | None = None
    ) -> list[EncodedText]:
        """Raises `InvalidParameter` for a text that cannot be encoded (lone surrogates), named by `name` and its
        index among the caller's texts (`indices`; None: the texts are all of them)."""
        if self._lower_case:
            from tokenizers.normalizers import Lowercase

            lower = Lowercase().normalize_str
            texts = [lower(text) if isinstance(text, str) else (lower(text[0]), lower(text[1])) for text in texts]
        try:
            if self._frame is not None:
                return [self._framed(text, *self._frame) for text in texts]
            if self._backend is None:
                return [self._slowly(text) for text in texts]
            most = self.max_length * _LONG
            if max(map(_size, texts), default=0) <= most:
                return self._encode(texts)
            return [self._encode([text])[0] if _size(text) <= most else self._cut(text) for text in texts]
        except (UnicodeEncodeError, TypeError, InvalidParameter):
            for index, text in zip(range(len(texts)) if indices is None else indices, texts, strict=True):
                for half in (text,) if isinstance(text, str) else text:
                    check_unicode(f"{name}[{index}]", half)
            raise

    def _encode(self, texts: Sequence[TextOrPair]) -> list[EncodedText]:
        backend: Any = self._backend
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=True)
        most, types = self.max_length, self._types
        encoded = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids = encoding.ids
            if len(ids) > most:
                encoded.append(self._cut(text))
            elif types and not isinstance(text, str):
                encoded.append(EncodedText(ids, _second(encoding.type_ids)))
            else:
                encoded.append(EncodedText(ids))
        return encoded

    def _cut(self, text: TextOrPair) -> EncodedText:
        """The encoding of a text that may be too long."""
        backend: Any = self._backend
        pair = not isinstance(text, str)
        first, *rest = backend.encode_batch_fast(
            [text] if isinstance(text, str) else list(text), add_special_tokens=False
        )
        room = max(0, self.max_length - int(backend.num_special_tokens_to_add(pair)))
        lengths = [len(encoding.ids) for encoding in (first, *rest)]
        cut = sum(lengths) > room
        if cut:
            for encoding, length in zip((first, *rest), _shares(lengths, room), strict=True):
                encoding.truncate(length, direction=self._side)
        whole = backend.post_process(first, rest[0] if pair else None, add_special_tokens=True)
        return EncodedText(whole.ids, _second(whole.type_ids) if pair and self._types else 0, cut)

    def _framed(self, text: TextOrPair, before: tuple[int, ...], behind: tuple[int, ...]) -> EncodedText:
        assert isinstance(text, str)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        room = max(0, self.max_length - len(before) - len(behind))
        return EncodedText([*before, *ids[:room], *behind], cut=len(ids) > room)

    def _slowly(self, text: TextOrPair) -> EncodedText:
        """Through transformers' wrapper, which changes its settings with each call."""
        with self._lock:
            whole = self._hf([text])  # in a list: alone, an empty second text would be none
            cut = self._hf([text], truncation="longest_first", max_length=self.max_length)
        types = cut.get("token_type_ids") if self._types and not isinstance(text, str) else None
        ids = list(cut["input_ids"][0])
        return EncodedText(ids, _second(types[0]) if types else 0, len(whole["input_ids"][0]) > len(ids))


def _shares(lengths: Sequence[int], room: int) -> list[int]:
    """The number of tokens of each text that stay: the longer one is cut first, both if they are equally long."""
    if len(lengths) == 1:
        return [room]
    short, long = sorted(lengths)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room // 2 + room % 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


def _second(types: Sequence[int]) -> int:
    return types.index(1) if 1 in types else 0


def _size(text: TextOrPair) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])
