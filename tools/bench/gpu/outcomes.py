"""A plugin of pytest that bounds each test, and writes its outcome when it ends. So a run that is cut off loses none.

``MUON_TEST_SECONDS`` is the limit of a test. ``MUON_TEST_OUTCOMES`` names the file, whose lines have an outcome each, in
JSON. A test that began and did not end has the outcome "running" alone.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def _write(test: str, outcome: str, seconds: float = 0.0, text: str = "") -> None:
    line = {"test": test, "outcome": outcome, "seconds": seconds, "text": text}
    content = json.dumps(line)
    path = Path(os.environ["MUON_TEST_OUTCOMES"])
    with path.open("a") as file:
        file.write(f"{content}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(nodeid, "running")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    seconds = int(os.environ["MUON_TEST_SECONDS"])

    def end(number: int, frame: Any) -> None:
        raise TimeoutError(f"{item.nodeid} took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_logreport(report: Any) -> None:
    # The phases before and after a test only tell something if they do not pass.
    if report.when != "call" and report.passed:
        return
    text = ""
    if report.failed:
        parts = [report.longreprtext]
        for title, captured in report.sections:
            parts.append(f"--- {title} ---\n{captured}")
        text = "\n".join(parts)
    elif report.skipped and isinstance(report.longrepr, tuple):
        _, _, text = report.longrepr
    _write(report.nodeid, report.outcome, report.duration, text)
