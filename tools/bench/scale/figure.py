"""Draws the simulated step of two models over the number of ranks."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot
from torch.optim._muon_engine.schedule.buckets import MAX_PEERS

from .cases import Case
from .report import report


if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from matplotlib.axes import Axes

    from .hardware import Hardware

LINES = {
    "all_gather": ("all-gather, Newton-Schulz everywhere", "#8c959f", ":"),
    "step": ("this engine", "#2f6fb5", "-"),
    "one_level": ("the same in one level", "#d9822b", "--"),
    "ideal": ("ideal", "#3d9a5f", "-"),
    "largest": ("Newton-Schulz of the largest matrix", "#a14fb0", ":"),
}
PANELS = {
    "Llama 3 70B, FSDP": [
        Case("Llama 3 70B", "fsdp", ranks)
        for ranks in (8, 32, 64, 128, 512, 1024, 4096)
    ],
    "DeepSeek-V3, FSDP x EP 64": [
        Case("DeepSeek-V3", "ep", outer, 64) for outer in (1, 2, 8, 32, 64)
    ],
}


def draw(path: Path, hardware: Hardware, prefetch: int) -> None:
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(10, 4.2), sharey=True)
    for axes, (title, cases) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, [report(case, hardware, prefetch) for case in cases])
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("seconds a step, simulated")
    panels[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Axes, found: list[dict[str, Any]]) -> None:
    ranks = [one["ranks"] for one in found]
    for name, (label, colour, style) in LINES.items():
        seconds = [nan if one[name] is None else one[name] for one in found]
        axes.plot(ranks, seconds, style, color=colour, label=label)
    axes.axvline(MAX_PEERS, color="#d0d7de", linewidth=1, zorder=0)
    across = axes.get_xaxis_transform()
    axes.text(MAX_PEERS, 0.02, f" {MAX_PEERS} ranks", fontsize=7, transform=across)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
