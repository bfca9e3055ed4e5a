"""Plays all stages, and writes the page after each of them."""

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .stages import Found, Machine, NotRun, STAGES


MOST = 4000  # characters of an error


def play(stage: Callable[[Machine], Found], machine: Machine) -> tuple[str, Found]:
    """The state of a stage in words, and what it has found."""
    try:
        return "done", stage(machine)
    except NotRun as reason:
        return "not run", Found([str(reason)])
    except Exception:
        return "failed", Found([traceback.format_exc()[-MOST:]])


def write(folder: Path, about: str, stages: dict[str, Any], hardware: Any) -> None:
    """Both pages, for readers and for programs."""
    values = {"about": about, "stages": stages, "hardware": hardware}
    content = json.dumps(values, indent=1)
    (folder / "gpu.json").write_text(f"{content}\n")
    parts = ["# Muon on this machine", about]
    for name, stage in stages.items():
        parts.append(f"## {name}: {stage['state']}, {stage['seconds']:.0f} s")
        for text in stage["texts"]:
            parts.append(f"```\n{text.rstrip()}\n```")
    content = "\n\n".join(parts)
    (folder / "gpu.md").write_text(f"{content}\n")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.bench.gpu", description=__doc__)
    add = result.add_argument
    add("folder", type=Path, help="for gpu.md and gpu.json")
    names = [stage.__name__ for stage in STAGES]
    add("--only", nargs="+", choices=names, default=names, metavar="STAGE")
    add("--overlay", default="unknown", help="its name, for the page")
    return result


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    device, gpus = "cpu", 0
    where = "without a GPU, at small sizes on a CPU"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = accelerator.type
        gpus = torch.accelerator.device_count()
        where = f"on {gpus} x {device}"
    about = f"{where}, torch {torch.__version__}, overlay {args.overlay}"
    print(about, flush=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Any] = {}
    hardware: dict[str, float] = {}
    for stage, limit in STAGES.items():
        name = stage.__name__
        if name not in args.only:
            continue
        began = time.monotonic()
        state, found = play(stage, Machine(device, gpus, began + limit))
        seconds = time.monotonic() - began
        stages[name] = {"state": state, "seconds": seconds, **found._asdict()}
        hardware |= found.hardware
        write(args.folder, about, stages, hardware)
        print(f"{name}: {state}, {seconds:.0f} s", flush=True)
    print(args.folder / "gpu.md")
    has_failed = any(stage["state"] == "failed" for stage in stages.values())
    return int(has_failed)


if __name__ == "__main__":
    # Where this process was started to ignore interrupts, pytest would ignore that of the time limit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes of a stage end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
