"""``measured``: the simulator's costs against the times of a ``gpu.json``, on the same matrices and one rank."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.models import MODELS
from torch.optim._newton_schulz import NS_ALGORITHMS

from ..table import render
from .cases import Case
from .costs import ADAMW, FOREACH, MatrixKind, newton_schulz_seconds, Options
from .hardware import Hardware
from .report import simulated


MODEL = "Llama 3.2 1B"


class Row(NamedTuple):
    """What was measured, in words; and seconds."""

    what: str
    measured: float
    model: float


def tables(path: Path, hardware: Hardware) -> Iterator[str]:
    """Steps, passes and single shapes.

    Raises:
        ValueError: ``path`` lacks what the stages steps, passes and newton_schulz measure.
    """
    try:
        stages = json.loads(path.read_bytes())["stages"]
        found = {name: stages[name]["values"] for name in STAGES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} lacks the stages {', '.join(STAGES)}: {error!r}"
        ) from error
    for name, rows_of in STAGES.items():
        rows = []
        for what, measured, model in rows_of(found[name], hardware):
            difference = model / measured - 1
            times = f"{1e3 * measured:.3f}", f"{1e3 * model:.3f}"
            rows.append([what, *times, f"{difference:+.0%}"])
        yield render([f"{name}, ms", "measured", "model", "difference"], rows)


def _steps(values: Mapping[str, Any], hardware: Hardware) -> Iterator[Row]:
    """A step of one rank by options, and AdamW's."""
    case = Case(MODEL, "fsdp", 1)
    for layout, times in values.items():
        for name, seconds in times.items():
            if name.startswith("ours-"):
                prefetch, algorithm, *others = name.removeprefix("ours-").split("-")
                options = Options(algorithm, "fused" in others, int(prefetch))
                step = simulated(case, hardware, options)
                words = ", ".join([algorithm, *others])
                yield Row(f"{layout}: {words}", seconds, step.seconds)
        adamw = ADAMW * _elements() / hardware.memory_bandwidth
        yield Row(f"{layout}: AdamW, fused", times["fused"], adamw)


def _passes(values: Mapping[str, Any], hardware: Hardware) -> Iterator[Row]:
    """The passes of a step."""
    before = FOREACH.accumulate + FOREACH.blend
    nbytes = {
        "before": before,
        "after": FOREACH.apply,
        "step": before + FOREACH.apply,
    }
    for name, (_, seconds) in values["passes"].items():
        model = nbytes[name] * _elements() / hardware.memory_bandwidth
        yield Row(f"{name}, default", seconds, model)


def _elements() -> int:
    return sum(rows * columns for rows, columns in MODELS[MODEL].shapes)


def _newton_schulz(values: Mapping[str, Any], hardware: Hardware) -> Iterator[Row]:
    """Matrices and batches by algorithm."""
    for shape, batch, times in values["rows"]:
        rows, columns = shape
        kind = MatrixKind((rows, columns))
        for name, seconds in times.items():
            algorithm, _, graph = name.partition(",")
            if algorithm in NS_ALGORITHMS:
                model = newton_schulz_seconds(
                    kind, batch, algorithm, hardware, bool(graph)
                )
                yield Row(f"{batch} x {rows} x {columns}, {name}", seconds, model)


STAGES = {"steps": _steps, "passes": _passes, "newton_schulz": _newton_schulz}
