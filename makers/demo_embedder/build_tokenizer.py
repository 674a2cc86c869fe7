"""Trains the embedder's tokenizer: ``python -m makers.demo_embedder.build_tokenizer``.

WordPiece over lower-cased text, as BERT has it (Devlin et al. 2019). The generator invents names by the syllable, so
the vocabulary has the pieces that any name is spelled with, beside the plain words that it knows.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from asyncengine.demo import EMBEDDER_PATH
from makers.demo_embedder import lexicon
from makers.demo_embedder.pairs import stream
from makers.demo_embedder.verbs import gerund, participle, past

VOCABULARY = 4096
MAX_TOKENS = 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def texts(groups: int) -> Iterator[str]:
    """Texts of the generator, and every word of the lexicon often enough to be kept whole."""
    for group in itertools.islice(stream(seed="tokenizer"), groups):
        for pair in group:
            yield pair.query
            yield pair.text
    phrases = [phrase for domain in lexicon.DOMAINS for deed in domain.deeds for phrase in deed.words]
    forms = " ".join(f"{phrase} {gerund(phrase)} {past(phrase)} {participle(phrase)}" for phrase in phrases)
    for _ in range(200):
        yield forms


def build(groups: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(texts(groups), trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "model_max_length": MAX_TOKENS,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=30000)
    parser.add_argument("--output", type=Path, default=EMBEDDER_PATH)
    arguments = parser.parse_args()
    tokenizer = build(arguments.groups)
    save(tokenizer, arguments.output)
    print(f"{tokenizer.get_vocab_size()} tokens written to {arguments.output}")


if __name__ == "__main__":
    main()
