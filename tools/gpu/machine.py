"""What an interpreter's torch finds on this machine."""

from __future__ import annotations

import json
import subprocess
from typing import NamedTuple


_ASK = """
import importlib.util, json, platform
import torch
gpu = torch.cuda.is_available()
needed = ("pytest", "expecttest", "numpy")
print(json.dumps({
    "torch": torch.__version__,
    "python": platform.python_version(),
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if gpu else [],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    "missing": [name for name in needed if importlib.util.find_spec(name) is None],
}))
"""


class Machine(NamedTuple):
    torch: str
    python: str
    cuda: str | None
    gpus: list[str]
    nccl: str | None
    # Packages that the tests import and this interpreter lacks.
    missing: list[str]

    def words(self) -> str:
        gpus = ", ".join(self.gpus) or "no GPU"
        return (
            f"{gpus}; torch {self.torch}, CUDA {self.cuda}, NCCL {self.nccl}, "
            f"Python {self.python}"
        )


def look(python: str) -> Machine:
    """Raises OSError or ``CalledProcessError`` where ``python`` has no torch."""
    done = subprocess.run(
        [python, "-c", _ASK], capture_output=True, text=True, check=True, timeout=300
    )
    return Machine(**json.loads(done.stdout.splitlines()[-1]))
