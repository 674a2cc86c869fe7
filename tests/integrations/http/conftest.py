"""The demo model behind an app, once for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.http_server import serving_models


@pytest.fixture(scope="module")
def demo_url() -> Iterator[str]:
    """Base URL of an app that answers with the demo model, whatever name it is asked for."""
    with serving_models({"demo": "demo"}, aliases={"*": "demo"}) as (url, _):
        yield url
