"""Has cosmic-ray change every expression of the modules that start no process, one at a time.

``python -m tools.mutation.pure [FILE ...]``, where a FILE is below ``torch/optim/_muon_engine``; without one
all that ``cosmic-ray.toml`` names, which takes hours. Afterwards come the changes that no test has noticed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from tools.overlay.repo import ROOT

from .cli import optim
from .trial import check_redirect, copied, environment


CONFIG = Path(__file__).with_name("cosmic-ray.toml")


def main(files: list[str]) -> int:
    if importlib.util.find_spec("cosmic_ray") is None:
        print(f"first {sys.executable} -m pip install cosmic-ray", file=sys.stderr)
        return 2
    with copied(optim(ROOT)) as folder:
        check_redirect(folder, ROOT)
        text = CONFIG.read_text()
        if files:
            paths = json.dumps([f"optim/_muon_engine/{file}" for file in files])
            text = re.sub(r"(?m)^module-path = .*$", f"module-path = {paths}", text)
        (folder / CONFIG.name).write_text(text)
        roots = {"MUON_ROOT": str(ROOT), "MUON_PYTHON": sys.executable}
        for command in (
            ("cosmic-ray", "baseline", CONFIG.name),
            ("cosmic-ray", "init", CONFIG.name, "session.sqlite"),
            ("cosmic-ray", "exec", CONFIG.name, "session.sqlite"),
            ("cr-report", "--show-diff", "--surviving-only", "session.sqlite"),
        ):
            program = Path(sys.executable).with_name(command[0])
            code = subprocess.run(
                [program, *command[1:]], cwd=folder, env=environment(folder) | roots
            ).returncode
            if code:
                print(f"{' '.join(command)}: exit code {code}", file=sys.stderr)
                return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
