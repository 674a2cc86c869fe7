"""Trains the tokenizer: ``python -m makers.demo_vision.build_tokenizer``.

Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) of 512 tokens: any text can be read, and the words of the
generator are a token each.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from asyncengine.demo import VISION_PATH
from makers.demo_embedder.export import write_json
from makers.demo_vision.conversations import SYSTEM, conversation

VOCABULARY = 512
IMAGE = "<image>"
END = "<|end|>"
NOTHING = "Nothing"
"""The word that a token of an empty ninth of a picture is near to (`train.Trainer.tower_loss`)."""
SPECIAL = (
    "<|endoftext|>", END, "<|system|>", "<|user|>", "<|assistant|>", IMAGE, "<fake_token_around_image>", "<global-img>",
)  # fmt: skip
"""Tokens by their ids. A turn has two of them, so that a question costs little; the last two stand around a picture in
Idefics3's prompts."""


def texts(count: int) -> Iterator[str]:
    """Turns of generated conversations."""
    rng = random.Random("vision/tokenizer")
    for _ in range(count):
        for _, text in conversation(rng, 6).turns:
            yield text
    yield from SYSTEM
    yield NOTHING


def build(conversations: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose decoding is exact for any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts(conversations), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the chat template stands beside them already."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=4000)
    parser.add_argument("--output", type=Path, default=VISION_PATH)
    arguments = parser.parse_args()
    tokenizer = build(arguments.conversations)
    save(tokenizer, arguments.output)
    print(f"{tokenizer.get_vocab_size()} tokens written to {arguments.output}")


if __name__ == "__main__":
    main()
