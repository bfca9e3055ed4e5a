"""One HTML page about one step, without a server: owners and loads, the timeline, and bytes by rank.

``python -m tools.bench scale --only TITLE --html FILE`` writes it for a row of the table. For an optimizer of
your own, call :func:`write` with ``optimizer._engine.schedule``.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.schedule.schedule import Schedule

from .engine_view import described
from .scale.costs import DEFAULT, Options
from .scale.hardware import Hardware
from .scale.plan import make_plan, Plan
from .scale.report import link_bytes, milliseconds
from .scale.timeline import simulate, Step


# With more ranks, the page shows the busiest ones.
MOST_BARS, MOST_TIMELINES = 32, 16
WIDTH, LEFT, HEIGHT = 700, 70, 18
LANES = {"gather": 0, "orthogonalize": 1, "passes": 1, "scatter": 2, "relay": 2}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; max-width: 66em; margin: 2em auto; color: #24292f }}
svg {{ display: block }} text {{ font-size: 11px }} pre {{ overflow-x: auto }}
.load, .orthogonalize {{ fill: #2f6fb5 }} .gather, .received {{ fill: #3d9a5f }}
.scatter, .sent {{ fill: #d9822b }} .relay {{ fill: #a14fb0 }} .passes {{ fill: #9aa4af }} .mean {{ stroke: #cf222e }}
</style></head><body>
<h1>{title}</h1>
<p>One optimizer step, simulated: {step} ms on {world} ranks, {matrices} matrices, prefetch_count {prefetch}.
{shown}</p>
<h2>Owners and loads</h2>
<p>Newton-Schulz of each rank. The red line is the mean of all ranks.</p>
{loads}
<h2>Timeline of the step</h2>
<p>Lanes of a rank: gather (green), Newton-Schulz (blue), passes over memory (gray), scatter (orange) and
broadcasts to replicas (purple), from 0 to {step} ms. Point at a bar for its times.</p>
{timeline}
<h2>Bytes by rank</h2>
<p>Sent (orange) and received (green), with what a rank passes on.</p>
{traffic}
<h2>Muon.describe() on rank {first}</h2>
<pre id="describe">{described}</pre>
</body></html>
"""


def write(
    path: Path,
    title: str,
    schedule: Schedule,
    world: int,
    hardware: Hardware | None = None,
    options: Options = DEFAULT,
) -> None:
    """Simulates one step of ``schedule`` on ``world`` ranks and writes the page to ``path``."""
    hardware = hardware or Hardware()
    plan = make_plan(schedule, world, hardware.gpus_per_node)
    step = simulate(plan, hardware, options)
    busiest = np.argsort(-step.busy, kind="stable")
    shown = ""
    if world > MOST_BARS:
        shown = f"The {MOST_BARS} busiest ranks are shown."
    ranks = np.sort(busiest[:MOST_BARS])
    tables, _ = described(schedule, int(busiest[0]), options.prefetch)
    content = PAGE.format(
        title=escape(title),
        step=milliseconds(step.seconds),
        world=world,
        matrices=len(schedule.layouts),
        prefetch=options.prefetch,
        shown=shown,
        loads=_loads(schedule, step, ranks),
        timeline=_timeline(step, np.sort(busiest[:MOST_TIMELINES])),
        traffic=_traffic(plan, ranks),
        first=busiest[0],
        described=escape(tables),
    )
    path.write_text(content)


def _loads(schedule: Schedule, step: Step, ranks: NDArray) -> str:
    owned = np.bincount(schedule.owners, minlength=len(step.busy))
    words = []
    for matrices, busy in zip(owned, step.busy, strict=True):
        words.append(f"owns {matrices}: {milliseconds(busy)} ms")
    return _bars("loads", ranks, [(step.busy, "load")], words, step.busy.mean())


def _traffic(plan: Plan, ranks: NDArray) -> str:
    sent, received = link_bytes(plan).sum(1)
    words = []
    for sent_bytes, received_bytes in zip(sent, received, strict=True):
        words.append(f"{sent_bytes / 1e6:.1f} MB, {received_bytes / 1e6:.1f} MB")
    series = [(sent, "sent"), (received, "received")]
    return _bars("traffic", ranks, series, words)


def _bars(
    name: str,
    ranks: NDArray,
    series: Sequence[tuple[NDArray, str]],
    words: Sequence[str],
    mean: float | None = None,
) -> str:
    """One row per rank, with one bar per series and the words of the rank."""
    largest = max(float(values.max()) for values, _ in series) or 1.0
    height = (HEIGHT - 3) / len(series)
    parts = []
    for row, rank in enumerate(ranks):
        row_top = row * HEIGHT
        parts.append(_label(row_top, f"rank {rank}"))
        for series_index, (values, kind) in enumerate(series):
            width = WIDTH * values[rank] / largest
            box = Box(LEFT, row_top + series_index * height, width, height)
            parts.append(_rect(kind, rank, box, f"rank {rank}: {words[rank]}"))
        parts.append(_label(row_top, words[rank], LEFT + WIDTH + 6))
    if mean is not None:
        x = LEFT + WIDTH * mean / largest
        bottom = len(ranks) * HEIGHT
        parts.append(f'<path class="mean" d="M{x:.1f} 0V{bottom}"/>')
    return _svg(name, len(ranks), parts)


def _timeline(step: Step, ranks: NDArray) -> str:
    lane_height = (HEIGHT - 3) / 3
    parts = []
    for row, rank in enumerate(ranks):
        parts.append(_label(row * HEIGHT, f"rank {rank}"))
    for event in step.events:
        for row, rank in enumerate(ranks):
            lane_top = row * HEIGHT + LANES[event.kind] * lane_height
            for event_index in np.flatnonzero(event.ranks == rank):
                begin = float(event.begin[event_index])
                end = float(event.end[event_index])
                x = LEFT + WIDTH * begin / step.seconds
                width = WIDTH * (end - begin) / step.seconds
                box = Box(x, lane_top, width, lane_height)
                words = f"{milliseconds(begin)} to {milliseconds(end)} ms"
                parts.append(_rect(event.kind, rank, box, f"{event.kind}: {words}"))
    return _svg("timeline", len(ranks), parts)


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def _svg(name: str, rows: int, parts: Sequence[str]) -> str:
    width, height = LEFT + WIDTH + 150, rows * HEIGHT
    begin = f'<svg id="{name}" width="{width}" height="{height}">'
    return "\n".join([begin, *parts, "</svg>"])


def _rect(kind: str, rank: int, box: Box, tooltip: str) -> str:
    corner = f'x="{box.x:.1f}" y="{box.y:.1f}"'
    size = f'width="{box.width:.2f}" height="{box.height:.1f}"'
    title = f"<title>{tooltip}</title>"
    return f'<rect class="{kind}" data-rank="{rank}" {corner} {size}>{title}</rect>'


def _label(y: float, text: str, x: float = 0) -> str:
    baseline = y + HEIGHT - 5
    return f'<text x="{x}" y="{baseline:.1f}">{text}</text>'
