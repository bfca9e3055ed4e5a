"""Plays all stages, and writes the page whenever a stage has found something."""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .stages import CutOff, Found, Machine, NotRun, STAGES


LAST = 20  # lines of a traceback or of a program's output


class Page:
    """The findings of all stages so far, in two files."""

    def __init__(self, folder: Path, about: str) -> None:
        self.folder = folder
        self.about = about
        self.stages: dict[str, dict[str, Any]] = {}
        self.hardware: dict[str, float] = {}
        self.began = 0.0

    def begin(self, name: str) -> None:
        self.began = time.monotonic()
        self.stages[name] = {"state": "running"}
        self.tell(name, Found([], {}))

    def tell(self, name: str, found: Found) -> None:
        """Replaces what the stage has told before."""
        texts, values, hardware = found
        self.stages[name] |= {"texts": [*texts], "values": values}
        self.hardware |= hardware
        self.write(name)

    def end(self, name: str, state: str, *texts: str) -> None:
        stage = self.stages[name]
        stage["state"] = state
        stage["texts"] += texts
        self.write(name)
        print(f"{name}: {state}, {stage['seconds']:.0f} s", flush=True)

    def write(self, name: str) -> None:
        self.stages[name]["seconds"] = time.monotonic() - self.began
        values = {"about": self.about, "stages": self.stages, "hardware": self.hardware}
        content = json.dumps(values, indent=1)
        self.replace("gpu.json", f"{content}\n")
        self.replace("gpu.md", self.markdown())

    def replace(self, name: str, text: str) -> None:
        # A kill leaves the former text, not half of this one.
        scratch = self.folder / f"{name}.new"
        scratch.write_text(text)
        os.replace(scratch, self.folder / name)

    def markdown(self) -> str:
        parts = ["# Muon on this machine", self.about]
        for name, stage in self.stages.items():
            parts.append(f"## {name}: {stage['state']}, {stage['seconds']:.0f} s")
            for text in stage["texts"]:
                parts.append(f"```\n{text.rstrip()}\n```")
        content = "\n\n".join(parts)
        return f"{content}\n"


def play(stage: Callable[[Machine], Found], machine: Machine, page: Page) -> None:
    name = stage.__name__
    page.begin(name)
    machine = machine._replace(tell=partial(page.tell, name))
    try:
        page.tell(name, stage(machine))
    except NotRun as reason:
        page.end(name, "not run", str(reason))
    except CutOff as reason:
        page.end(name, "cut off", str(reason))
    except Exception:
        lines = traceback.format_exc().rstrip().splitlines()
        page.end(name, "failed", "\n".join(lines[-LAST:]))
    except BaseException as reason:
        page.end(name, "cut off", type(reason).__name__)
        raise
    else:
        page.end(name, "done")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser("python -m tools.bench.gpu", description=__doc__)
    add = result.add_argument
    add("folder", type=Path, help="for gpu.md, gpu.json and traces")
    names = [stage.__name__ for stage in STAGES]
    add("--only", nargs="+", choices=names, default=names, metavar="STAGE")
    add("--overlay", default="", help="its name, for the page")
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
    overlay = args.overlay or "unknown"
    about = f"{where}, torch {torch.__version__}, overlay {overlay}"
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(folder, about)
    print(about, flush=True)
    for stage, seconds in STAGES.items():
        if stage.__name__ in args.only:
            ends = time.monotonic() + seconds
            play(stage, Machine(device, gpus, folder, ends), page)
    print(args.folder / "gpu.md")
    states = {stage["state"] for stage in page.stages.values()}
    return 0 if states <= {"done", "not run"} else 1


if __name__ == "__main__":
    # Processes of a stage end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
