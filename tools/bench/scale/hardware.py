"""The cluster of a simulated step. Bandwidths are of one rank and one direction."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes; FLOP/s, bytes/s and seconds.

    Compute: H100 SXM, 989e12 dense bfloat16 FLOP/s (NVIDIA's data sheet), at ``utilization`` in products of
    Newton-Schulz, and at ``training_utilization`` in forward and backward. A symmetric product by the kernels takes
    ``symmetric`` of a product's time in an iteration. Copies read and write ``memory_bandwidth`` together. These are of
    an H100 (docs/data/h100-gpu.md): products alone got 0.69 and 0.72 in two runs.
    Inside a node: NVLink, 900e9 bytes/s in both directions together (same data sheet).
    Between nodes: one 400 Gb/s InfiniBand adapter for each GPU (NVIDIA's DGX H100 data sheet).
    Latencies: those of NCCL's own model (src/graph/tuning.cc) for a hop of a ring of small messages.
    """

    peak_flops: float = 989e12
    utilization: float = 0.72
    training_utilization: float = 0.4
    symmetric: float = 0.78
    memory_bandwidth: float = 3.0e12
    intra_bandwidth: float = 450e9
    inter_bandwidth: float = 50e9
    intra_latency: float = 0.47e-6
    inter_latency: float = 2.7e-6
    gpus_per_node: int = 8

    @property
    def flops(self) -> float:
        return self.peak_flops * self.utilization

    def with_values(self, settings: Iterable[str]) -> "Hardware":
        """This cluster with values written as ``name=value``, of a GPU by name, or of a file ``gpu.json``.

        Raises:
            ValueError: a setting has no such form, no such name, or no such value.
        """
        values = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if value:
                values[name] = value
            elif setting in GPUS:
                values |= GPUS[setting]
            else:
                values |= _of_page(Path(setting))
        converted = {}
        for name, value in values.items():
            converted[name] = self._converted(name, value)
        return replace(self, **converted)

    def _converted(self, name: str, value: str | float) -> float:
        """``value`` in the type of the field ``name``; only a latency may be zero."""
        if name not in vars(self):
            names = ", ".join(vars(self))
            raise ValueError(f"--hardware has no {name!r}; it has {names}")
        type_of_field = type(getattr(self, name))
        number = type_of_field(value)
        may_be_zero = "latency" in name
        if number > 0 or (number == 0 and may_be_zero):
            return number
        raise ValueError(f"--hardware {name}={value} is not positive")


# With A100s: half of the NVLink, and adapters of 200 Gb/s (NVIDIA's data sheets of A100 and DGX A100).
# Its memory has 2039e9 bytes/s there, of which copies are assumed to get as much as on an H100.
A100 = {
    "peak_flops": 312e12,
    "memory_bandwidth": 1.8e12,
    "intra_bandwidth": 300e9,
    "inter_bandwidth": 25e9,
}
GPUS: dict[str, dict[str, float]] = {"h100": vars(Hardware()), "a100": A100}


def _of_page(path: Path) -> dict[str, float]:
    try:
        return json.loads(path.read_bytes())["hardware"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "is neither NAME=VALUE, h100, a100 nor the gpu.json of `setup_overlay.py gpu`"
        raise ValueError(f"--hardware {path} {what}: {error!r}") from error
