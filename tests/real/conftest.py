from pathlib import Path

import pytest
from support.real_models import real_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    [file] = real_model("smollm2").glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def minilm() -> Path:
    return real_model("minilm")
