"""Plays all stages, and writes the page after each of them."""

import argparse
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from .stages import Found, Machine, NotRun, STAGES


LAST = 20  # lines of a traceback or of a program's output


def play(stage: Any, machine: Machine) -> tuple[str, Found]:
    """The state of a stage afterwards, and what it found."""
    try:
        return "done", stage(machine)
    except NotRun as reason:
        return "not run", Found([str(reason)], {})
    except Exception:
        lines = traceback.format_exc().rstrip().splitlines()
        return "failed", Found(["\n".join(lines[-LAST:])], {})


def markdown(about: str, stages: dict[str, dict[str, Any]]) -> str:
    parts = ["# Muon on this machine", about]
    for name, stage in stages.items():
        parts.append(f"## {name}: {stage['state']}, {stage['seconds']:.0f} s")
        parts += [f"```\n{text.rstrip()}\n```" for text in stage["texts"]]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tools.bench.gpu", description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="for gpu.md, gpu.json and trace.json.gz")
    names = [stage.__name__ for stage in STAGES]
    add("--only", nargs="+", choices=names, default=names, metavar="STAGE")
    add("--overlay", default="", help="its name, for the page")
    args = parser.parse_args(arguments)
    found = torch.accelerator.current_accelerator(check_available=True)
    device = "cpu" if found is None else found.type
    gpus = torch.accelerator.device_count() if found else 0
    where = (
        f"on {gpus} x {device}" if gpus else "without a GPU, at small sizes on a CPU"
    )
    about = f"{where}, torch {torch.__version__}, overlay {args.overlay or 'unknown'}"
    args.folder.mkdir(parents=True, exist_ok=True)
    stages: dict[str, dict[str, Any]] = {}
    hardware: dict[str, float] = {}
    print(about, flush=True)
    for stage, seconds in STAGES.items():
        name = stage.__name__
        if name not in args.only:
            continue
        began = time.monotonic()
        machine = Machine(device, gpus, args.folder.resolve(), began + seconds)
        state, result = play(stage, machine)
        took = time.monotonic() - began
        stages[name] = {"state": state, "seconds": took, **result._asdict()}
        hardware |= stages[name].pop("hardware")
        print(f"{name}: {state}, {took:.0f} s", flush=True)
        values = {"about": about, "stages": stages, "hardware": hardware}
        (args.folder / "gpu.json").write_text(json.dumps(values, indent=1) + "\n")
        (args.folder / "gpu.md").write_text(markdown(about, stages))
    print(args.folder / "gpu.md")
    return int(any(stage["state"] == "failed" for stage in stages.values()))


if __name__ == "__main__":
    # Processes of a stage end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
