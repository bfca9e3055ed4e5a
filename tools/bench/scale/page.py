"""The simulation's part of docs/bench.md, and its picture."""

from __future__ import annotations

import textwrap
from typing import Any, TYPE_CHECKING

from .. import section
from . import table


if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .hardware import Hardware

NAME = "tools.bench scale"


def write(
    docs: Path, cases: Sequence[dict[str, Any]], hardware: Hardware, prefetch: int
) -> None:
    """Raises ValueError where the page has no place for it."""
    from . import figure

    section.put(docs / "bench.md", NAME, body(cases))
    figure.draw(docs / "figures" / "scale.png", hardware, prefetch)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, width=110, subsequent_indent=indent)


def body(cases: Sequence[dict[str, Any]]) -> str:
    blocks = [
        textwrap.indent(text, "    ")
        for text in (table.times(cases), table.volumes(cases))
    ]
    many = [case for case in cases if case["one_level"] is not None]
    words = "\n".join(_wrapped(f"- {line}", "  ") for line in table.beyond(cases))
    parts = ["", *blocks]
    if many:
        shares = [case["one_level"] / case["step"] for case in many]
        peers = max(case["peers_max"] for case in many)
        parts.append(
            _wrapped(
                f"In {len(many)} of {len(cases)} cases a rank would have more than {table.MANY_PEERS} peers; in two "
                f"levels it has up to {peers}. One level would take {min(shares):.2f} to {max(shares):.2f} times as "
                "long."
            )
        )
    parts += [f"Above {table.AIM} of the ideal:", words, ""]
    return "\n\n".join(parts)[1:-1]
