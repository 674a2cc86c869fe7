"""Embedding texts beside sentence-transformers and onnxruntime: the same random checkpoint, texts and threads.

Makes a BERT checkpoint of a shape in a temporary folder (random weights, a vocabulary of made-up words, mean pooling,
vectors of length one) and texts of 8 to 512 tokens mixed, embeds all of them with each system, turn by turn, and prints
medians of texts per second, ratios, and the smallest cosine to sentence-transformers' float32 vectors. Ours goes
through the public API, one `embed` call of `AsyncEngine` on an event loop that runs all the time, as an application's
does: to start a loop for each call and stop it again takes 0.2 to 0.3 ms from cold caches. onnxruntime gets the model
as fastembed's are: exported, its optimizer's fusions for BERT applied, texts sorted by length in batches of 32 and
padded, tokenized and pooled outside; in int8 by its dynamic quantization. A system that cannot be imported is left out,
by name.

    python -m benchmarks.embeddings [--shape minilm --texts 128 --rounds 5 --threads 2 --only ours,st --json]
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPES = {
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "bge-base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCAB, LONGEST, BATCH = 30522, 512, 32
PAUSE = 0.1
"""Seconds between two turns: onnxruntime's threads spin for 40 milliseconds after a call, at the cost of the next."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Embed = Callable[[list[str]], np.ndarray | Awaitable[np.ndarray]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--shortest", type=int, default=8, help="tokens")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", help="names, separated by commas; a name's beginning will do")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(SHAPES[options.shape], Path(folder))
        report = asyncio.run(compare(options, Path(folder)))
    print(json.dumps(report) if options.json else table(report))


def make_checkpoint(shape: dict[str, Any], folder: Path) -> None:
    """A checkpoint of sentence-transformers with random weights, in float32."""
    import transformers as hf

    torch.manual_seed(0)
    hf.utils.logging.disable_progress_bar()
    model = hf.BertModel(hf.BertConfig(vocab_size=VOCAB, max_position_embeddings=LONGEST, **shape))
    with torch.no_grad():  # what is random at its usual size makes all vectors alike
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    words = [*SPECIAL, *(f"w{index}" for index in range(VOCAB - len(SPECIAL)))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    vocab = {word: index for index, word in enumerate(words)}
    hf.BertTokenizerFast(vocab=vocab, model_max_length=LONGEST).save_pretrained(folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST, "do_lower_case": False}))
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": shape["hidden_size"], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_texts(options: argparse.Namespace) -> list[str]:
    """Texts of so many tokens each, the two special ones included."""
    chance = random.Random(0)
    lengths = [chance.randint(options.shortest, options.longest) - 2 for _ in range(options.texts)]
    return [" ".join(f"w{chance.randrange(VOCAB - len(SPECIAL))}" for _ in range(length)) for length in lengths]


async def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """{system: texts per second, cosine}, in turns."""
    async with AsyncExitStack() as engines:
        return await compare_within(options, folder, engines)


async def compare_within(options: argparse.Namespace, folder: Path, engines: AsyncExitStack) -> dict[str, Any]:
    """Compare as `compare` does; engines are closed with `engines`."""

    def own(**settings: Any) -> Awaitable[Embed]:
        return ours(folder, options, engines, **settings)

    makers: dict[str, Callable[[], Embed | Awaitable[Embed]]] = {
        "st float32": lambda: sentence_transformers(folder, torch.float32),
        "st bfloat16": lambda: sentence_transformers(folder, torch.bfloat16),
        "onnxruntime float32": lambda: onnxruntime(folder, options, int8=False),
        "onnxruntime int8": lambda: onnxruntime(folder, options, int8=True),
        "ours float32": lambda: own(dtype="float32"),
        "ours bfloat16": lambda: own(dtype="bfloat16"),
        "ours int8": lambda: own(dtype="float32", quantization="int8"),
        "ours int8 bfloat16": lambda: own(dtype="bfloat16", quantization="int8"),
    }
    wanted = tuple(options.only.split(",")) if options.only else ("",)
    systems: dict[str, Embed] = {}
    left_out: dict[str, str] = {}
    for name, make in makers.items():
        if name.startswith(wanted):
            try:
                systems[name] = await finished(make())
            except ImportError as error:
                left_out[name] = str(error)
    texts = make_texts(options)
    vectors = {name: await finished(embed(texts)) for name, embed in systems.items()}  # and warms up
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(options.rounds):
        names = list(systems)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            await asyncio.sleep(PAUSE)
            began = time.perf_counter()
            await finished(systems[name](texts))
            seconds[name].append(time.perf_counter() - began)
    reference = vectors.get("st float32", next(iter(vectors.values())))
    rows = {
        name: {
            "texts_per_second": len(texts) / statistics.median(seconds[name]),
            "cosine": float((vectors[name] * reference).sum(1).min()),
        }
        for name in systems
    }
    return {"shape": options.shape, "texts": len(texts), "threads": options.threads, "rows": rows, "left_out": left_out}


async def finished(given: Any) -> Any:
    """Await a value if it has to be awaited, and give it."""
    return await given if inspect.isawaitable(given) else given


async def ours(folder: Path, options: argparse.Namespace, engines: AsyncExitStack, **settings: Any) -> Embed:
    from asyncengine import AsyncEngine

    settings |= {"show_progress": False, "num_threads": options.threads}
    engine = await engines.enter_async_context(await AsyncEngine.from_pretrained(str(folder), **settings))

    async def embed(texts: list[str]) -> np.ndarray:
        return (await engine.embed(texts, show_progress=False)).vectors

    return embed


def sentence_transformers(folder: Path, dtype: torch.dtype) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype}, local_files_only=True)
    return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False).astype(np.float32)


def onnxruntime(folder: Path, options: argparse.Namespace, int8: bool) -> Embed:
    import onnxruntime as ort
    from tokenizers import Tokenizer

    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads
    session = ort.InferenceSession(
        exported(folder, SHAPES[options.shape], int8), settings, providers=["CPUExecutionProvider"]
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)

    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        out = np.zeros((len(texts), SHAPES[options.shape]["hidden_size"]), dtype=np.float32)
        for first in range(0, len(texts), BATCH):
            chosen = order[first : first + BATCH]
            found = tokenizer.encode_batch([texts[index] for index in chosen])
            width = max(len(each.ids) for each in found)
            ids, mask = (np.zeros((len(chosen), width), dtype=np.int64) for _ in range(2))
            for row, each in enumerate(found):
                ids[row, : len(each.ids)] = each.ids
                mask[row, : len(each.ids)] = 1
            hidden = session.run(None, {"ids": ids, "mask": mask})[0]
            mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
            out[chosen] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return out

    return embed


class Plain(torch.nn.Module):
    """transformers' BERT as older exports have it, whose attention onnxruntime's optimizer knows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings, self.layers = model.embeddings, model.encoder.layer
        self.heads = model.config.num_attention_heads

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        own = self.embeddings
        positions = torch.arange(ids.shape[1])[None]
        x = own.word_embeddings(ids) + own.token_type_embeddings(torch.zeros_like(ids))
        x = own.LayerNorm(x + own.position_embeddings(positions))
        hidden = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            part = layer.attention.self
            shape = (ids.shape[0], ids.shape[1], self.heads, x.shape[-1] // self.heads)
            query, key, value = (each(x).view(shape).permute(0, 2, 1, 3) for each in (part.query, part.key, part.value))
            scores = torch.matmul(query, key.transpose(-1, -2)) / (shape[3] ** 0.5) + hidden
            attended = torch.matmul(scores.softmax(-1), value).permute(0, 2, 1, 3).contiguous()
            attended = attended.view(ids.shape[0], ids.shape[1], x.shape[-1])
            x = layer.attention.output.LayerNorm(layer.attention.output.dense(attended) + x)
            inner = torch.nn.functional.gelu(layer.intermediate.dense(x))
            x = layer.output.LayerNorm(layer.output.dense(inner) + x)
        return x


def exported(folder: Path, shape: dict[str, Any], int8: bool) -> str:
    """The model as onnxruntime reads it, made once."""
    import transformers as hf
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model

    plain, fused, small = (str(folder / f"{name}.onnx") for name in ("plain", "fused", "int8"))
    if not os.path.exists(fused):
        model = Plain(hf.BertModel.from_pretrained(folder).eval())
        ids = torch.randint(10, 1000, (2, 16))
        axes = {name: {0: "batch", 1: "length"} for name in ("ids", "mask", "out")}
        torch.onnx.export(
            model, (ids, torch.ones_like(ids)), plain, input_names=["ids", "mask"], output_names=["out"],
            dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip
        known = optimize_model(
            plain, model_type="bert", num_heads=shape["num_attention_heads"], hidden_size=shape["hidden_size"]
        )
        known.save_model_to_file(fused)
    if int8 and not os.path.exists(small):
        unknown = {"DefaultTensorType": 1}  # float32, behind its own fused operators
        quantize_dynamic(fused, small, weight_type=QuantType.QInt8, per_channel=True, extra_options=unknown)
    return small if int8 else fused


def table(report: dict[str, Any]) -> str:
    rows = report["rows"]
    against = {"float32": ("st float32", "onnxruntime float32"), "bfloat16": ("st bfloat16",)}
    lines = [
        f"{report['shape']}, {report['texts']} texts, {report['threads']} threads",
        "| system | texts/s | smallest cosine | ratios |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        kind = "int8" if "int8" in name else name.rpartition(" ")[2]
        peers = (*against.get(kind, ("onnxruntime int8",)),) if name.startswith("ours") else ()
        ratios = [
            f"{row['texts_per_second'] / rows[peer]['texts_per_second']:.2f} x {peer}" for peer in peers if peer in rows
        ]
        lines.append(f"| {name} | {row['texts_per_second']:.1f} | {row['cosine']:.6f} | {', '.join(ratios)} |")
    lines += [f"left out: {name} ({why})" for name, why in report["left_out"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
