"""Documents that were invented for the demo, and questions with words of their right answers (documents.toml)."""

import tomllib
from importlib import resources

_CONTENT = tomllib.loads((resources.files(__package__) / "documents.toml").read_text(encoding="utf-8"))
DOCUMENTS: dict[str, str] = _CONTENT["documents"]
ARCHIVE = "\n".join(DOCUMENTS[name] for name in _CONTENT["archive"])
ABOUT_ARCHIVE, FOR_RETRIEVAL, SMALL_JOBS = (
    [(question, answer) for question, answer in rows] for rows in _CONTENT["questions"].values()
)


def counting(index: int) -> tuple[str, str]:
    """One of many questions that differ."""
    low, high = index % 13, index % 13 + 4 + index % 5
    return f"Count from {low} to {high}.", ", ".join(str(n) for n in range(low, high + 1))
