"""Every kernel path of the FlashInfer backend against the torch backend in float32, on fresh random data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from asyncengine.execution.attention.base import AttentionBackend, LayerSpec
from asyncengine.execution.attention.flashinfer import FlashInferBackend, load_flashinfer
from asyncengine.execution.device.pinned import is_hopper
from asyncengine.execution.models.kernel_builds import attention_modules
from asyncengine.execution.runner.graphs import Capture, CudaCapture
from tools.gpucheck.pairs import Pair, Parts
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, flashinfer_missing

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Largest error of an output that averages values of standard deviation 1."""
COMPILERS = 5
"""Modules built at once. Each runs one compiler per source, which takes memory more than cores."""
_MOST = 400
_ROWS = 6
_BASE = LayerSpec(index=0, num_heads=8, num_kv_heads=4, key_dim=128, value_dim=128, scale=0.09)

Make = Callable[["Case"], AttentionBackend]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of layer, or several in one model."""

    name: str
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype = torch.bfloat16
    page_sizes: tuple[int, ...] = (16,)
    stored: torch.dtype | None = None
    page_size: int = 16
    """Page size of this case, one of those."""
    quick: bool = True
    """Whether the quick run has it too."""


def cases() -> list[Case]:
    """Variants of layers; those that differ in dimensions, type, window or soft cap compile kernels of their own."""

    def heads(count: int, kv: int, dim: int = 128, **changes: object) -> LayerSpec:
        made = replace(_BASE, num_heads=count, num_kv_heads=kv, key_dim=dim, value_dim=dim, scale=dim**-0.5)
        return replace(made, **changes)  # type: ignore[arg-type]

    pages = (16, 1)
    soft = heads(8, 4, 64, softcap=20.0)
    return [
        Case("group of 1", (heads(4, 4),), page_sizes=pages),
        Case("group of 2", (heads(8, 4),), page_sizes=pages),
        Case("group of 4", (heads(8, 2),), page_sizes=pages),
        Case("group of 7, 64 dimensions", (heads(14, 2, 64),), page_sizes=pages),
        Case("group of 2, 64 dimensions", (heads(8, 4, 64),)),
        Case("group of 8", (heads(16, 2),), page_sizes=(16, 5)),
        Case("window", (heads(8, 4, 64, window=21),)),
        Case("soft cap", (soft,)),
        Case("window and soft cap beside soft cap", (replace(soft, window=33), replace(soft, index=1))),
        Case("256 dimensions", (heads(4, 2, 256),), quick=False),
        Case("float16", (heads(8, 4, 64),), torch.float16),
        Case("8-bit keys and values", (heads(8, 4),), stored=torch.float8_e4m3fn, quick=False),
    ]  # fmt: skip


def flashinfer_backend(case: Case, device: torch.device) -> FlashInferBackend:
    pages = 1 + _ROWS * -(-_MOST // case.page_size)
    return FlashInferBackend(
        case.layers, pages, case.page_size, case.dtype, device, max_rows=64,
        max_pages_per_row=-(-_MOST // case.page_size), kv_dtype=case.stored,
    )  # fmt: skip


def chosen(session: Session) -> list[Case]:
    return [case for case in cases() if case.quick or not session.settings.quick]


# ---------------------------------------------------------------- compiling


def run_compile(session: Session) -> None:
    """Build all modules of FlashInfer's that later sections call, several at a time. Takes seconds on a machine that
    has them in its cache. What is not built when the section's time is up is built in the background: whoever calls
    one earlier waits for it."""
    missing = flashinfer_missing()
    if missing is not None:
        raise CheckFailed(missing)
    works = modules(chosen(session), load_flashinfer())
    pool = ThreadPoolExecutor(COMPILERS)
    session.compiling = [pool.submit(_timed, session, work) for work in works]
    pool.shutdown(wait=False)
    wait(session.compiling, max(0.0, session.left))


def modules(chosen: Sequence[Case], flashinfer: Any) -> list[Callable[[], object]]:
    """Calls that each have one of them built, those of small models first, which most sections run."""
    found: list[Callable[[], object]] = [
        partial(flashinfer.activation.get_act_and_mul_module, name) for name in ("silu", "gelu_tanh", "gelu")
    ]
    for dtype, stored in dict.fromkeys((case.dtype, case.stored) for case in chosen):
        specs = [spec for case in chosen if (case.dtype, case.stored) == (dtype, stored) for spec in case.layers]
        specs.sort(key=lambda spec: spec.key_dim)
        hopper = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
        attention = attention_modules(flashinfer, specs, dtype, stored or dtype, hopper=hopper)
        found = [*found[:-3], *attention, *found[-3:]]
    return found


def _timed(session: Session, work: Callable[[], object]) -> None:
    began = session.seconds
    work()
    session.say(f"... built a module of FlashInfer's in {session.seconds - began:.1f} s, at {session.seconds:.0f} s")


def compiled(session: Session) -> str:
    """Wait for all of them, as long as the section has time."""
    done, late = wait(session.compiling, max(0.0, session.left))
    failed = [f"{type(error).__name__}: {error}" for future in done if (error := future.exception()) is not None]
    if failed or late:
        raise CheckFailed(f"{len(failed)} failed, {len(late)} not built yet, of {len(done) + len(late)}; {failed[:1]}")
    return f"{len(done)} modules"


# ---------------------------------------------------------------- comparing


def run(session: Session) -> None:
    missing = flashinfer_missing()
    if missing is not None:
        raise CheckFailed(missing)
    if session.compiling:
        session.check("all kernels compile", lambda: compiled(session))
    make = partial(flashinfer_backend, device=session.device)
    for case in chosen(session):
        for size in case.page_sizes:
            sized = replace(case, page_size=size)
            name = f"{case.name}, pages of {size}"
            session.check(name, partial(check_case, sized, make, session.device, session.settings.seed, CudaCapture))


def check_case(case: Case, make: Make, device: torch.device, seed: int, capture: Callable[[], Capture] | None) -> str:
    """Prompts, chunks, mixed steps, decodes over page boundaries, and decodes padded to captured sizes.

    `capture`: None leaves graphs out. Raises `CheckFailed` for an error beyond `TOLERANCE`.
    """
    tested = make(case)
    pair = Pair(
        tested, case.layers, _ROWS, dtype=case.dtype, device=device, stored=case.stored, most=_MOST, seed=seed
    )  # fmt: skip
    errors: dict[str, float] = {}

    def step(kind: str, parts: Parts) -> None:
        errors[kind] = max(errors.get(kind, 0.0), pair.step(parts))

    try:
        step("prompts", [(0, 3), (1, 130), (3, 17)])
        step("decodes", [(1, 1), (0, 1), (3, 1)])
        step("mixed", [(2, 9), (1, 1), (0, 70), (3, 1), (5, 2)])
        step("a chunk", [(1, 190)])
        step("mixed", [(4, 33), (2, 1)])
        for _ in range(18):
            step("decodes", [(row, 1) for row in (3, 2, 1, 5, 0, 4)])
        if capture is not None:
            captured = capture()
            for size in (8, 2):
                pair.capture(size, captured)
            for turn in range(18):
                rows, size = [([5, 0, 2, 1, 3], 8), ([4], 2), ([0, 1, 2, 3, 4, 5], 8)][turn % 3]
                errors["graphs"] = max(errors.get("graphs", 0.0), pair.replay(rows, size))
    finally:
        pair.close()
    limit = TOLERANCE[case.dtype]
    wrong = {kind: error for kind, error in errors.items() if not error <= limit}
    if wrong:
        kinds = ", ".join(f"{kind} by {error:.3g}" for kind, error in wrong.items())
        raise CheckFailed(f"differs from the torch backend in {kinds}; at most {limit:g} is rounding")
    kind = max(errors, key=lambda name: errors[name])
    return f"largest error {errors[kind]:.2g} ({kind}), tolerance {limit:g}"
