"""The smallest tokenizer there is, for tests that go to a grammar library directly."""

from __future__ import annotations

END = 256


class Bytes:
    """The 256 bytes and an end, as `llguidance.TokenizerWrapper` wants it."""

    eos_token_id = END
    bos_token_id = None
    special_token_ids = (END,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
