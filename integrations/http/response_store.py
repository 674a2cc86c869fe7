"""Responses that clients can come back to, within a number of bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]
OVERHEAD = 1024
"""Bytes that an entry costs besides its JSON text, generously."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its own input, as JSON text: that is what they cost, to the byte."""

    response: bytes
    items: bytes
    previous: str | None
    """Id of the response that it went on from."""
    owner: object
    """The connection that alone may come back to it; None: everybody."""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items) + OVERHEAD


class ResponseStore:
    """Responses by id, in memory; beyond `most` bytes those that were used least recently go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self._used

    def put(self, response: Item, items: Sequence[Item], owner: object = None) -> None:
        """Keep a response and the items that were its own input."""
        named = [{**item, "id": item.get("id") or f"item_{response['id']}_{at}"} for at, item in enumerate(items)]
        made = Stored(_packed(response), _packed(named), response["previous_response_id"], owner)
        self.delete(response["id"])
        self._stored[response["id"]] = made
        self._used += made.size
        while self._used > self._most:
            self._used -= self._stored.popitem(last=False)[1].size

    def get(self, response_id: str, owner: object = None) -> Stored | None:
        """The response of that id, which counts as used."""
        found = self._stored.get(response_id)
        if found is None or found.owner not in (None, owner):
            return None
        self._stored.move_to_end(response_id)
        return found

    def delete(self, response_id: str) -> bool:
        """Forget a response, and say whether there was one. Those that went on from it can't be gone on from."""
        found = self._stored.pop(response_id, None)
        self._used -= found.size if found else 0
        return found is not None

    def chain(self, response_id: str | None, owner: object = None) -> list[Stored] | None:
        """A response and all before it, oldest first, as one conversation; None where one of them is gone."""
        found: list[Stored] = []
        while response_id is not None:
            stored = self.get(response_id, owner)
            if stored is None:
                return None
            found.append(stored)
            response_id = stored.previous
        return found[::-1]


def _packed(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
