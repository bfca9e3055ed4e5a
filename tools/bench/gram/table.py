"""What ``tools.bench gram`` prints, part by part."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any, TYPE_CHECKING

from ..figures import quartiles, ratio
from ..table import render, spread


if TYPE_CHECKING:
    from collections.abc import Sequence


LAST = 10  # steps of which the mean loss is shown


def speed(found: dict[str, Any]) -> str:
    times = found["times"]
    reps = [len(one["seconds"]["gram"]) for one in times]
    parts = [
        f"On {found['cpu']}; medians of {min(reps)} to {max(reps)} repetitions in turn, quartiles in brackets.",
        _speed(times),
        _quiet(times),
    ]
    if "without_amx" in found:
        rest = found["without_amx"]
        parts += ["The same, with oneDNN told not to use AMX:", _speed(rest)]
        parts.append(_quiet(rest))
    return _page(parts)


def _speed(times: Sequence[dict[str, Any]]) -> str:
    threads = sorted({one["threads"] for one in times})
    rows: dict[tuple[int, ...], list[str]] = {}
    for one in times:
        shape = tuple(one["shape"])
        flops, seconds = one["flops"], one["seconds"]
        share = flops["gram"] / flops["quintic"]
        row = rows.setdefault(shape, ["x".join(map(str, shape)), f"{share:.2f}"])
        low, middle, high = (1e3 * s for s in quartiles(seconds["quintic"]))
        row += [
            f"{middle:.1f} ({low:.1f}-{high:.1f})",
            spread(ratio(seconds["gram"], seconds["quintic"])),
        ]
    head = ["", "FLOPs, gram / quintic"]
    for count in threads:
        word = "1 thread" if count == 1 else f"{count} threads"
        head += [f"quintic ms, {word}", "gram / quintic"]
    return render(head, rows.values())


def _quiet(times: Sequence[dict[str, Any]]) -> str:
    whole, stolen, others = (
        sum(one[what] for one in times) for what in ("core_seconds", "stolen", "others")
    )
    return (
        f"Meanwhile the host gave {100 * stolen / whole:.1f} % of the cores to other machines, and other programs "
        f"here had {100 * max(0, others - stolen) / whole:.1f} %."
    )


def accuracy(found: Sequence[dict[str, Any]]) -> str:
    coefficients = list(found[0]["distances"])
    rows = []
    for one in found:
        row = [f"{'x'.join(map(str, one['shape']))}, {one['spectrum']}"]
        for of in (0, 1):
            for name in coefficients:
                distances = one["distances"][name].values()
                row += [f"{distance[of]:.3f}" for distance in distances]
        rows.append(row)
    head = [""]
    for what in ("exact", "orthogonal"):
        for name in coefficients:
            head += [f"{name}: quintic, {what}", "gram"]
    return _page([render(head, rows)])


def training(found: Sequence[dict[str, Any]]) -> str:
    by_run = {(one["world"], one["seed"], one["algorithm"]): one for one in found}
    rows = []
    for world, seed in dict.fromkeys(key[:2] for key in by_run):
        quintic, gram = (by_run[world, seed, name] for name in ("quintic", "gram"))
        word = "process" if world == 1 else "processes"
        rows.append(
            [
                f"seed {seed}, {world} {word}",
                *(f"{mean_of_last(one):.4f}" for one in (quintic, gram)),
                *(f"{one['held_out']:.4f}" for one in (quintic, gram)),
                f"{furthest(quintic, gram):.4f}",
            ]
        )
    head = [
        "",
        f"loss, last {LAST} steps: quintic",
        "gram",
        "held out: quintic",
        "gram",
        "largest difference",
    ]
    parts = [render(head, rows)]
    for name in ("quintic", "gram"):
        runs = [
            one
            for one in found
            if one["seed"] == found[0]["seed"] and one["algorithm"] == name
        ]
        if len(runs) == 2:
            parts.append(
                f"Losses of one process and of {runs[1]['world']}, {name}: at most {furthest(*runs):.4f} apart."
            )
    return _page(parts)


def mean_of_last(one: dict[str, Any]) -> float:
    return statistics.mean(one["losses"][-LAST:])


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["losses"], other["losses"], strict=True)
    return max(abs(a - b) for a, b in pairs)


def _page(parts: Sequence[str]) -> str:
    """Tables as they are, sentences wrapped."""
    blocks = [
        textwrap.indent(part, "    ")
        if "\n" in part
        else textwrap.fill(part, width=110)
        for part in parts
    ]
    return "\n" + "\n\n".join(blocks) + "\n"
