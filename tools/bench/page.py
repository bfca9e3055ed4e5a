"""One HTML page about one step, without a server: owners and loads, the timeline, and bytes by rank.

``python -m tools.bench scale --only TITLE --html FILE`` writes it for a row of the table. For an optimizer of
your own, call :func:`write` with ``optimizer._engine.schedule``.
"""

import math
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
from .scale.timeline import PASSES_BESIDE, simulate, Step


# With more ranks, the page shows the busiest ones, and some of those that have least to do.
MOST_BARS, MOST_TIMELINES = 32, 16
LEAST_BUSY = 4
# The timeline has about so many marks, at round times.
MARKS = 8
WIDTH, LEFT, HEIGHT = 700, 70, 18
LANES = {
    "gather": 0,
    "orthogonalize": 1,
    "passes": 1,
    "scatter": 2,
    "relay": 2,
    PASSES_BESIDE: 2,
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; max-width: 66em; margin: 2em auto; color: #24292f }}
svg {{ display: block }} text {{ font-size: 11px }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere }}
.axis {{ stroke: #d0d7de }}
.load, .orthogonalize {{ fill: #2f6fb5 }} .gather, .received {{ fill: #3d9a5f }}
.scatter, .sent {{ fill: #d9822b }} .relay {{ fill: #a14fb0 }} .passes {{ fill: #9aa4af }} .mean {{ stroke: #cf222e }}
</style></head><body>
<h1>{title}</h1>
<p>One optimizer step, simulated: {step} ms on {world} ranks, {matrices} matrices, prefetch_count {prefetch}.
{shown}</p>
<h2>Owners and loads</h2>
<p>Newton-Schulz of each rank. The red line is the mean of all ranks. {idle}</p>
{loads}
<h2>Timeline of the step</h2>
<p>Lanes of a rank: gather (green), Newton-Schulz (blue), passes over memory (gray), scatter (orange) and
broadcasts to replicas (purple), from 0 to {step} ms. Where a lane is white, it waits. Point at a bar for its times.</p>
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
        shown = f"The {MOST_BARS - LEAST_BUSY} busiest ranks are shown, and the {LEAST_BUSY} ranks with least work."
    tables, _ = described(schedule, int(busiest[0]), options.prefetch)
    content = PAGE.format(
        title=escape(title),
        step=milliseconds(step.seconds),
        world=world,
        matrices=len(schedule.layouts),
        prefetch=options.prefetch,
        shown=shown,
        idle=_idle(step),
        loads=_loads(schedule, step, _shown(busiest, MOST_BARS)),
        timeline=_timeline(step, _shown(busiest, MOST_TIMELINES)),
        traffic=_traffic(plan, _shown(busiest, MOST_BARS)),
        first=busiest[0],
        described=escape(tables),
    )
    path.write_text(content)


def _shown(busiest: NDArray, most: int) -> NDArray:
    """At most so many ranks of those in the order of their work: the first, and the last ones."""
    if len(busiest) <= most:
        return np.sort(busiest)
    first, last = busiest[: most - LEAST_BUSY], busiest[-LEAST_BUSY:]
    return np.sort(np.concatenate([first, last]))


def _idle(step: Step) -> str:
    """How many ranks orthogonalize nothing."""
    count = int((step.busy == 0).sum())
    if not count:
        return "Each rank owns a matrix."
    part = count / len(step.busy)
    return f"{count:,} of {len(step.busy):,} ranks ({part:.0%}) own no matrix."


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
        words.append(f"{_in_words(sent_bytes)}, {_in_words(received_bytes)}")
    series = [(sent, "sent"), (received, "received")]
    return _bars("traffic", ranks, series, words)


def _in_words(nbytes: float) -> str:
    if nbytes < 1e9:
        return f"{nbytes / 1e6:.3g} MB"
    return f"{nbytes / 1e9:.3g} GB"


def _marks(milliseconds: float) -> list[float]:
    """Round times from 0 to the end, about ``MARKS`` of them."""
    rough = milliseconds / MARKS
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [distance * number for number in range(int(milliseconds / distance) + 1)]


def _axis(step: Step, rows: int) -> list[str]:
    """A line and a number at each of the marks, below the rows."""
    parts = []
    bottom = rows * HEIGHT
    for mark in _marks(1e3 * step.seconds):
        x = LEFT + WIDTH * mark / (1e3 * step.seconds)
        parts.append(f'<path class="axis" d="M{x:.1f} 0V{bottom}"/>')
        parts.append(_label(bottom, f"{mark:g}", x))
    parts.append(_label(bottom, "ms", LEFT + WIDTH + 6))
    return parts


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
    parts = _axis(step, len(ranks))
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
    # One more row for the axis.
    return _svg("timeline", len(ranks) + 1, parts)


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
