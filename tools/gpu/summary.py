"""What pytest's XML report says, for people."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from pathlib import Path


class Summary(NamedTuple):
    # Class -> how many of its tests passed, failed, were skipped.
    classes: dict[str, Counter[str]]
    # Reason -> how many tests it skipped.
    reasons: Counter[str]
    failed: list[str]

    @property
    def total(self) -> Counter[str]:
        return sum(self.classes.values(), Counter())


def read(path: Path) -> Summary:
    classes: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    failed = []
    for case in ET.parse(path).iter("testcase"):
        group = case.get("classname", "").rpartition(".")[2] or "?"
        skipped = case.find("skipped")
        if skipped is not None:
            outcome = "skipped"
            # Ranks and file names differ between tests that are skipped for one reason.
            reasons[re.sub(r"\s+", " ", skipped.get("message") or "no reason")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failed.append(f"{group}::{case.get('name')}")
        else:
            outcome = "passed"
        classes.setdefault(group, Counter())[outcome] += 1
    return Summary(classes, reasons, failed)


def text(summary: Summary) -> str:
    """The classes that are about GPUs one by one, all others together, and why tests were skipped."""
    rows = [("", "passed", "failed", "skipped")]
    about = {name: count for name, count in summary.classes.items() if "GPU" in name}
    rest = sum(
        (count for name, count in summary.classes.items() if name not in about),
        Counter(),
    )
    for name, count in [*sorted(about.items()), ("all other tests", rest)]:
        cells = (str(count[key]) for key in ("passed", "failed", "skipped"))
        rows.append((name, *cells))
    width = max(len(row[0]) for row in rows)
    lines = [
        f"{row[0]:<{width}}  {row[1]:>6}  {row[2]:>6}  {row[3]:>7}" for row in rows
    ]
    lines.append("")
    for reason, count in summary.reasons.most_common():
        lines.append(f"skipped {count}: {reason}")
    lines += [f"failed: {name}" for name in summary.failed]
    return "\n".join(lines)
