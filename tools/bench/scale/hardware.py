"""The cluster of a simulated step. Bandwidths are of one rank and one direction."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


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
        """This cluster with values written as ``name=value``."""
        values = dict(setting.split("=", 1) for setting in settings)
        return replace(
            self, **{k: type(getattr(self, k))(v) for k, v in values.items()}
        )
