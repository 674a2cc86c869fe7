"""The bundled demo model: its weights, and everything that made them."""

from __future__ import annotations

from pathlib import Path

MODEL_PATH = Path(__file__).resolve().parent / "model"
"""The Hugging Face folder of the demo model."""
