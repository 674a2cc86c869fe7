"""Trains the tokenizer: ``python -m makers.demo_model.build_tokenizer``.

Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) with one difference that matters for a small model that
must copy: a space is a token of its own, so a word has the same tokens after a space, a quote or a line break.
Digits, CJK characters and kana stand alone for the same reason.  The few runs of punctuation that JSON repeats
are one piece each, which shortens tool schemas by half.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncengine.demo import MODEL_PATH
from makers.demo_model.conversations import stream

VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    "<think>",
    "</think>",
)
PIECES = "|".join(
    (
        r"\{\"",
        r"\": \{\"",
        r"\": \[\"",
        r"\": \"",
        r"\": ",
        r"\", \"",
        r"\"\]?\}+",
        r"\"\], \"",
        r"\"\]",
        r"\}+, \"",
        r"\}+",
        r", \"",
        r" {2,}",
        r" ",
        r"\n+",
        r"[\t\r]+",
        r"\p{N}",
        r"[\p{Han}\p{Hiragana}\p{Katakana}]",
        r"[\p{L}\p{M}]+",
        r"[^\s\p{L}\p{M}\p{N}]",
        r"\s",
    )
)


def texts(count: int) -> Iterator[str]:
    """Raw text of generated conversations, with tool schemas as JSON."""
    for conversation in itertools.islice(stream(seed=1), count):
        for tool in conversation.tools or ():
            yield json.dumps(tool["function"], ensure_ascii=False)
        for message in conversation.messages:
            yield f"{message['role']}\n{message['content'] or ''}"
            for call in message.get("tool_calls", ()):
                yield json.dumps(call["function"], ensure_ascii=False)


def build(conversations: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose decoding is exact for any text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(VISIBLE),
        special_tokens=special,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts(conversations), trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the chat template stands beside them already."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=40000)
    parser.add_argument("--output", type=Path, default=MODEL_PATH)
    arguments = parser.parse_args()
    tokenizer = build(arguments.conversations)
    save(tokenizer, arguments.output)
    print(f"{tokenizer.get_vocab_size()} tokens written to {arguments.output}")


if __name__ == "__main__":
    main()
