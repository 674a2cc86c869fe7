"""Schemas that pydantic writes for models as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, SecretStr, TypeAdapter

from .case import Case, make


class Role(Enum):
    ADMIN = "admin"
    READER = "reader"


class Level(IntEnum):
    LOW = 1
    HIGH = 10


class Address(BaseModel):
    street: str
    city: str = Field(min_length=1)
    zip_code: str = Field(pattern=r"^\d{4,5}$")


class Profile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: UUID
    name: str = Field(min_length=1, max_length=80, description="Full name")
    age: Annotated[int, Field(ge=0, le=150)] | None = None
    role: Role = Role.READER
    tags: list[str] = Field(default_factory=list, max_length=5)
    address: Address | None = None


class Line(BaseModel):
    sku: str = Field(pattern=r"^[A-Z]{2}-\d{3}$")
    quantity: int = Field(gt=0)
    price: float = Field(ge=0)


class Invoice(BaseModel):
    number: int
    issued: date
    currency: Literal["EUR", "USD", "CHF"]
    lines: list[Line] = Field(min_length=1)
    paid: bool = False


class Event(BaseModel):
    at: datetime
    clock: time
    length: timedelta
    host: IPv4Address
    peer: IPv6Address
    link: AnyUrl


class Person(BaseModel):
    name: str
    knows: list[Person] = []


class Expression(BaseModel):
    op: Literal["+", "*"]
    left: Expression | float
    right: Expression | float


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Owner(BaseModel):
    pets: list[Cat | Dog]
    level: Level


class Tagged(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Point(NamedTuple):
    x: float
    y: float


class Shapes(BaseModel):
    origin: Point
    pairs: dict[str, tuple[int, str]]
    anything: Any
    either: int | str | None


class Labels(BaseModel):
    names: set[str]


class Secret(BaseModel):
    password: SecretStr


class Place(BaseModel):
    path: Path


class Blob(BaseModel):
    data: bytes


ADDRESS = {"street": "Main St 1", "city": "Zürich", "zip_code": "8001"}
PROFILE = {"id": "123e4567-e89b-12d3-a456-426614174000", "name": "Ada"}
LINE = {"sku": "AB-123", "quantity": 2, "price": 9.5}
INVOICE = {"number": 7, "issued": "2026-11-21", "currency": "EUR", "lines": [LINE]}
EVENT = {
    "at": "2026-11-21T10:00:00Z",
    "clock": "10:00:00Z",
    "length": "PT1H30M",
    "host": "127.0.0.1",
    "peer": "::1",
    "link": "https://example.org/",
}
FULL_PROFILE = {**PROFILE, "age": 36, "role": "admin", "tags": ["a", "b"], "address": ADDRESS}
SUM = {"op": "+", "left": 1.5, "right": {"op": "*", "left": 2, "right": 3}}

COMPILED: list[tuple[type[BaseModel], list[Any], list[Any]]] = [
    (Address, [ADDRESS], [{**ADDRESS, "zip_code": "123"}, {**ADDRESS, "city": ""}]),
    (Profile, [PROFILE, FULL_PROFILE], [{**PROFILE, "age": 151}, {**PROFILE, "role": "owner"}, {**PROFILE, "more": 1}]),
    (Invoice, [INVOICE, {**INVOICE, "paid": True}], [{**INVOICE, "lines": []}, {**INVOICE, "currency": "GBP"}]),
    (Event, [EVENT], [{**EVENT, "host": "localhost"}, {**EVENT, "length": "1h"}, {**EVENT, "link": "example"}]),
    (Person, [{"name": "a"}, {"name": "a", "knows": [{"name": "b", "knows": []}]}], [{"name": "a", "knows": [{}]}]),
    (Expression, [SUM], [{**SUM, "op": "-"}, {**SUM, "right": {}}]),
    (
        Owner,
        [{"pets": [{"kind": "cat", "lives": 9}, {"kind": "dog", "tricks": []}], "level": 10}],
        [{"pets": [], "level": 5}],
    ),
    (Shapes, [{"origin": [0, 1], "pairs": {"a": [1, "b"]}, "anything": [{}], "either": None}], [{"origin": [0]}]),
    (Secret, [{"password": "x"}], [{"password": 1}]),
    (Place, [{"path": "/tmp"}], [{}]),
    (Blob, [{"data": "x"}], [{"data": None}]),
    (Tagged, [{"pet": {"kind": "cat", "lives": 9}}], [{"pet": {"kind": "cat", "tricks": []}}]),
]

REFUSED: list[tuple[type[BaseModel], list[Any], str]] = [(Labels, [{"names": ["a", "b"]}], "uniqueItems")]

ADAPTED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "list_of_models": (list[Address], [[ADDRESS], []], [[{}]]),
    "map_of_models": (dict[str, Line], [{"a": LINE}, {}], [{"a": {}}]),
    "optional": (int | None, [1, None], ["1"]),
    "literal": (Literal["a", "b", 3], ["a", 3], ["c", 1]),
    "tuple": (tuple[int, str, bool], [[1, "a", True]], [[1, "a"], [1, "a", True, 1]]),
    "enum": (Role, ["admin"], ["ADMIN"]),
    "int_enum": (Level, [1, 10], [2]),
    "bounded_list": (
        Annotated[list[Annotated[int, Field(ge=1, le=6)]], Field(min_length=2, max_length=3)],
        [[1, 6]],
        [[1]],
    ),
    "named_tuple": (Point, [[1.5, 2]], [[1]]),
    "union": (Cat | Dog | None, [{"kind": "cat", "lives": 1}, None], [{"kind": "dog", "lives": 1}]),
}


def models() -> Iterator[Case]:
    for model, valid, invalid in COMPILED:
        yield make("pydantic", model.__name__, model.model_json_schema(), valid, invalid)
    for model, valid, keyword in REFUSED:
        yield make("pydantic", model.__name__, model.model_json_schema(), valid, refuses=keyword)
    for name, (kind, valid, invalid) in ADAPTED.items():
        yield make("pydantic", name, TypeAdapter(kind).json_schema(), valid, invalid)
