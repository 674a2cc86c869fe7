"""Lists of texts to token ids: the same as transformers gives, cut the same way, whatever the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.data import cases_of
from support.sentence_folders import make_tokenizer

from asyncengine.errors import InvalidParameter
from asyncengine.text.batches import BatchTokenizer
from asyncengine.text.tokenizer import TextTokenizer

ROWS: dict[str, Any] = cases_of(__file__)

WORDS = "the cat sat on mat dog one two three"


def tokenizer_in(folder: Path, **options: object) -> TextTokenizer:
    from transformers import AutoTokenizer

    make_tokenizer(folder, **options)  # type: ignore[arg-type]
    return TextTokenizer(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(("like", "side", "directly"), ROWS["texts_and_pairs_as_transformers_has_them"])
def test_texts_and_pairs_as_transformers_has_them(like: str, side: str, directly: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path, like=like)
    hf = tokenizer.hf
    hf.truncation_side = side
    if not directly:
        tokenizer.backend = None
    sizes = (0, 1, 4, 5, 8, 9, 100)
    texts = [" ".join((WORDS.split(" ") * 50)[:size]) for size in sizes]
    pairs = [(one, other) for one in texts for other in texts]
    for most in (8, 13):
        batches = BatchTokenizer(tokenizer, most)
        for items in (texts, pairs):
            for item, found in zip(items, batches.encode(items), strict=True):
                right = hf([item], truncation="longest_first", max_length=most)
                assert found.ids == right["input_ids"][0], item
                types = right.get("token_type_ids", [[]])[0]
                assert found.second == (types.index(1) if 1 in types else 0)
                assert found.cut == (len(hf([item])["input_ids"][0]) > most)


def test_small_letters_and_prompts(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path, lower=False)
    as_is, lowered = BatchTokenizer(tokenizer, 50), BatchTokenizer(tokenizer, 50, lower_case=True)
    assert as_is.encode(["The CAT"])[0].ids != as_is.encode(["the cat"])[0].ids
    assert lowered.encode(["The CAT", ("The", "CAT")]) == as_is.encode(["the cat", ("the", "cat")])
    assert as_is.prompt_length("the cat ") == 3  # what stands before it counts, what stands behind does not


def test_what_cannot_be_encoded_is_named(tmp_path: Path) -> None:
    batches = BatchTokenizer(tokenizer_in(tmp_path), 50)
    with pytest.raises(InvalidParameter, match=r"texts\[12\]: is not valid Unicode"):
        batches.encode(["the", "cat", "\ud800"], "texts", range(10, 13))
    framed = BatchTokenizer(tokenizer_in(tmp_path), 50, frame=((1,), (2,)))
    with pytest.raises(InvalidParameter, match=r"documents\[1\]: is not valid Unicode"):
        framed.encode(["the", "\ud800"], "documents")


def test_a_frame_stays_whole(tmp_path: Path) -> None:
    batches = BatchTokenizer(tokenizer_in(tmp_path), 10, frame=((1, 2, 3), (4, 5)))
    short, long = batches.encode(["the cat", "the cat " * 20])
    assert (short.ids[:3], short.ids[-2:], len(short.ids), short.cut) == ([1, 2, 3], [4, 5], 7, False)
    assert (long.ids[:3], long.ids[-2:], len(long.ids), long.cut) == ([1, 2, 3], [4, 5], 10, True)
