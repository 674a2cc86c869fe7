"""Held-out order of the demo reranker: ``python -m makers.demo_reranker.evaluate``.

A thousand texts of each kind, and queries for some of them, none of which training ever draws. The embedder finds the
`FOUND` nearest texts of each query, and the reranker sorts these: the share of queries whose text is then the first,
beside the embedder's own first. More than the share among those found is not to be had.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from asyncengine.demo import EMBEDDER_PATH, RERANKER_PATH
from makers.demo_embedder.bert import Served as Embedder
from makers.demo_embedder.evaluate import by_vectors, held_out
from makers.demo_embedder.pairs import MAKERS
from makers.demo_reranker.cross_encoder import Served

FOUND = 20
Rates = tuple[float, float, float, float]
"""Shares of queries whose text is the embedder's first, the reranker's first, among those found; and of those whose
text has a score above a half while no other found one has."""


def measure(folder: Path, texts: int, queries: int, seed: int = 7) -> dict[str, Rates]:
    """The rates of each skill."""
    reranker, near, rates = Served(folder), by_vectors(Embedder(EMBEDDER_PATH)), dict[str, Rates]()
    for skill in MAKERS:
        pairs = held_out(skill, texts, seed)
        passages = [pair.text for pair in pairs]
        counts = [0, 0, 0, 0]
        found = near([pair.query for pair in pairs[:queries]], passages).topk(FOUND).indices.tolist()
        for own, (pair, rows) in enumerate(zip(pairs, found, strict=False)):
            scores = reranker(pair.query, [passages[row] for row in rows])
            best = rows[int(torch.argmax(scores))]
            sure = [row for row, score in zip(rows, scores.tolist(), strict=True) if score > 0.5]
            for place, held in enumerate((rows[0] == own, best == own, own in rows, sure == [own])):
                counts[place] += held
        first, reranked, among, alone = (count / queries for count in counts)
        rates[skill] = first, reranked, among, alone
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=RERANKER_PATH)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--queries", type=int, default=300)
    arguments = parser.parse_args()
    table = Table("of held-out queries", "embedder's first", "reranker's first", f"among {FOUND}", "alone above 0.5")
    for skill, rates in measure(arguments.model, arguments.texts, arguments.queries).items():
        table.add_row(skill, *(f"{rate:.1%}" for rate in rates))
    Console().print(table)


if __name__ == "__main__":
    main()
