"""One HTML page about one step, without a server: owners and loads, the timeline, and bytes by rank.

``python -m tools.bench scale --only TITLE --html FILE`` writes it for a row of the table. For an optimizer of
your own, call :func:`write` with ``optimizer._engine.schedule``.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.optim._muon_engine.schedule.schedule import Schedule

from .engine_view import described
from .scale.hardware import Hardware
from .scale.plan import make_plan
from .scale.report import link_bytes, milliseconds
from .scale.timeline import simulate, Step


# With more ranks, the page shows the busiest ones.
MOST_BARS, MOST_TIMELINES = 32, 16
WIDTH, LEFT, HEIGHT = 700, 70, 18
LANES = {"gather": 0, "orthogonalize": 1, "scatter": 2, "relay": 2}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px sans-serif; max-width: 66em; margin: 2em auto; color: #24292f }}
svg {{ display: block }} text {{ font-size: 11px }} pre {{ overflow-x: auto }}
.load, .orthogonalize {{ fill: #2f6fb5 }} .gather, .received {{ fill: #3d9a5f }}
.scatter, .sent {{ fill: #d9822b }} .relay {{ fill: #a14fb0 }} .mean {{ stroke: #cf222e }}
</style></head><body>
<h1>{title}</h1>
<p>One optimizer step, simulated: {step} ms on {world} ranks, {matrices} matrices, prefetch_count {prefetch}.
{shown}</p>
<h2>Owners and loads</h2>
<p>Newton-Schulz of each rank. The red line is the mean of all ranks.</p>
{loads}
<h2>Timeline of the step</h2>
<p>Lanes of a rank: gather (green), Newton-Schulz (blue), scatter (orange) and broadcasts to
replicas (purple), from 0 to {step} ms. Point at a bar for its times.</p>
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
    prefetch: int = 1,
) -> None:
    """Simulates one step of ``schedule`` on ``world`` ranks and writes the page to ``path``."""
    hardware = hardware or Hardware()
    plan = make_plan(schedule, world, hardware.gpus_per_node)
    step = simulate(plan, hardware, prefetch)
    sent, received = link_bytes(plan).sum(1)
    owned = np.bincount(schedule.owners, minlength=world)
    busiest = np.argsort(-step.busy, kind="stable")
    ranks = np.sort(busiest[:MOST_BARS])
    traffic = [(sent, "sent"), (received, "received")]
    sizes = [f"{a / 1e6:.1f} MB, {b / 1e6:.1f} MB" for a, b in zip(sent, received)]
    words = [f"owns {o}: {milliseconds(b)} ms" for o, b in zip(owned, step.busy)]
    path.write_text(
        PAGE.format(
            title=escape(title),
            step=milliseconds(step.seconds),
            world=world,
            matrices=len(schedule.layouts),
            prefetch=prefetch,
            shown=f"The {MOST_BARS} busiest ranks are shown." * (world > MOST_BARS),
            loads=_bars("loads", ranks, [(step.busy, "load")], words, step.busy.mean()),
            timeline=_timeline(step, np.sort(busiest[:MOST_TIMELINES])),
            traffic=_bars("traffic", ranks, traffic, sizes),
            first=busiest[0],
            described=escape(described(schedule, int(busiest[0]), prefetch)[0]),
        )
    )


def _bars(
    name: str,
    ranks: NDArray,
    series: Sequence[tuple[NDArray, str]],
    words: Sequence[str],
    mean: float | None = None,
) -> str:
    """One row per rank, with one bar per series and the words of the rank."""
    most = max(float(values.max()) for values, _ in series) or 1.0
    parts = []
    for row, rank in enumerate(ranks):
        parts.append(_label(row * HEIGHT, f"rank {rank}"))
        for at, (values, kind) in enumerate(series):
            height = (HEIGHT - 3) / len(series)
            box = LEFT, row * HEIGHT + at * height, WIDTH * values[rank] / most, height
            parts.append(_rect(kind, rank, box, f"rank {rank}: {words[rank]}"))
        parts.append(_label(row * HEIGHT, words[rank], LEFT + WIDTH + 6))
    if mean is not None:
        x = LEFT + WIDTH * mean / most
        parts.append(f'<path class="mean" d="M{x:.1f} 0V{len(ranks) * HEIGHT}"/>')
    return _svg(name, len(ranks), parts)


def _timeline(step: Step, ranks: NDArray) -> str:
    lane = (HEIGHT - 3) / 3
    parts = [_label(row * HEIGHT, f"rank {rank}") for row, rank in enumerate(ranks)]
    for event in step.events:
        for row, rank in enumerate(ranks):
            for at in np.flatnonzero(event.ranks == rank):
                begin, end = float(event.begin[at]), float(event.end[at])
                x, width = (WIDTH * t / step.seconds for t in (begin, end - begin))
                box = LEFT + x, row * HEIGHT + LANES[event.kind] * lane, width, lane
                when = f"{milliseconds(begin)} to {milliseconds(end)} ms"
                parts.append(_rect(event.kind, rank, box, f"{event.kind}: {when}"))
    return _svg("timeline", len(ranks), parts)


def _svg(name: str, rows: int, parts: Sequence[str]) -> str:
    box = f'width="{LEFT + WIDTH + 150}" height="{rows * HEIGHT}"'
    return "\n".join([f'<svg id="{name}" {box}>', *parts, "</svg>"])


def _rect(kind: str, rank: int, box: tuple[float, ...], words: str) -> str:
    x, y, width, height = box
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    return (
        f'<rect class="{kind}" data-rank="{rank}" {place}><title>{words}</title></rect>'
    )


def _label(y: float, words: str, x: float = 0) -> str:
    return f'<text x="{x}" y="{y + HEIGHT - 5:.1f}">{words}</text>'
