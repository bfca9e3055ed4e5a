"""The cluster of a simulated step. Bandwidths are of one rank and one direction."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes; FLOP/s, bytes/s and seconds.

    Compute: H100 SXM, 989e12 dense bfloat16 FLOP/s (NVIDIA's data sheet), at ``utilization``.
    Inside a node: NVLink, 900e9 bytes/s in both directions together (same data sheet).
    Between nodes: one 400 Gb/s InfiniBand adapter for each GPU (NVIDIA's DGX H100 data sheet).
    Latencies: those of NCCL's own model (src/graph/tuning.cc) for a hop of a ring of small messages.
    """

    peak_flops: float = 989e12
    utilization: float = 0.5
    intra_bandwidth: float = 450e9
    inter_bandwidth: float = 50e9
    intra_latency: float = 0.47e-6
    inter_latency: float = 2.7e-6
    gpus_per_node: int = 8

    @property
    def flops(self) -> float:
        return self.peak_flops * self.utilization

    def with_values(self, settings: Iterable[str]) -> "Hardware":
        """This cluster with values written as ``name=value``, or those of a file ``gpu.json``.

        Raises:
            ValueError: a setting has no such form, no such name, or no such value.
        """
        values = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            values |= _of_page(Path(setting)) if not value else {name: value}
        found = {}
        for name, value in values.items():
            if name not in vars(self):
                names = ", ".join(vars(self))
                raise ValueError(f"--hardware has no {name!r}; it has {names}")
            found[name] = type(getattr(self, name))(value)
            if not found[name] > 0 and (found[name] or "latency" not in name):
                raise ValueError(f"--hardware {name}={value} is not positive")
        return replace(self, **found)


def _of_page(path: Path) -> dict[str, float]:
    try:
        return json.loads(path.read_bytes())["hardware"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "is neither NAME=VALUE nor the gpu.json of `setup_overlay.py gpu`"
        raise ValueError(f"--hardware {path} {what}: {error!r}") from error
