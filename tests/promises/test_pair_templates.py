"""Rerankers that are text generators read a pair as their own chat template has it, or are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.sentence_folders import make_tokenizer
from support.tiny_models import make_checkpoint

from asyncengine import Engine
from asyncengine.errors import InvalidParameter, UnsupportedModel

QUERY = '(messages | selectattr("role", "eq", "query") | first).content'
DOCUMENT = '(messages | selectattr("role", "eq", "document") | first).content'
OWN = f"<s>is it yes or no <end>query: {{{{ {QUERY} }}}} document: {{{{ {DOCUMENT} }}}} !<end>the"
USUAL = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<end>{% endfor %}"
SWAPPED = f"{{{{ {DOCUMENT} }}}} <s>{{{{ {QUERY} }}}}"
TWICE = f"{OWN} {{{{ {QUERY} }}}}"
DOCUMENTS = ["the cat sat", "a dog!", "", "one two three"]


def reranker(folder: Path, template: str, family: str = "llama") -> Path:
    make_checkpoint(family, folder)
    make_tokenizer(folder, like="end", length=None)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(
        str(folder), device="cpu", dtype="float32", task="rerank", show_progress=False, page_size=4
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pairs_are_put_as_the_template_has_them(family: str, tmp_path: Path) -> None:
    folder = reranker(tmp_path, OWN, family)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    right = []
    for document in DOCUMENTS:
        text = f"<s>is it yes or no <end>query: where document: {document} !<end>the"
        logits = model(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0, -1]
        right.append(torch.sigmoid(logits[yes] - logits[no]).item())
    with load(folder) as engine:
        found = {ranked.index: ranked.score for ranked in engine.rerank("where", DOCUMENTS).results}
        assert np.abs([found[i] - right[i] for i in range(len(right))]).max() < 1e-5
        assert np.ptp(right) > 1e-3
        again = engine.classify([("where", document) for document in DOCUMENTS]).results
        assert [each.score for each in again] == [found[i] for i in range(len(right))]
        with pytest.raises(InvalidParameter, match="instruction: is nothing that"):
            engine.rerank("where", DOCUMENTS, instruction="the dog")
        for text in ("the cat", ["the cat"]):
            with pytest.raises(InvalidParameter, match=r"texts\[0\]: must be a pair"):
                engine.classify(text)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (USUAL, "no reranker whose prompt is known: its chat template has no roles 'query' and 'document'"),
        (SWAPPED, "does not have a query and then a document, once each"),
        (TWICE, "does not have a query and then a document, once each"),
        ("{{ raise_exception('query' + 'no') }}" + OWN, "its chat template takes no query and document"),
    ],
)
def test_other_templates_are_refused(template: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        load(reranker(tmp_path, template))
