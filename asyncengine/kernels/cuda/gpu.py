"""Triton's kernels as layers call them, of tensors on a GPU; each is described where it is written."""

from __future__ import annotations

from asyncengine.kernels.cuda.few_rows import few_rows
from asyncengine.kernels.cuda.few_rows import pays as few_rows_pay
from asyncengine.kernels.cuda.grouped_experts import ExpertWeights, mix, route
from asyncengine.kernels.cuda.logit_processors import process_logits
from asyncengine.kernels.cuda.lora import Factors, add_deltas, tiles_of
from asyncengine.kernels.cuda.qk_norm_rope import add_rms_norm, angles, gated_norm, prepare_and_write, rms_norm
from asyncengine.kernels.cuda.recurrence import Recurrence, convolve

__all__ = [
    "ExpertWeights", "Factors", "Recurrence", "add_deltas", "add_rms_norm", "angles", "convolve", "few_rows",
    "few_rows_pay", "gated_norm", "mix", "prepare_and_write", "process_logits", "rms_norm", "route", "tiles_of",
]  # fmt: skip
