"""What can be measured, by name: the matrices of a step, their layouts, the implementations.

Nothing here imports torch, so that the process that only starts others stays light.
"""

from __future__ import annotations

from dataclasses import dataclass


Shape = tuple[int, int]

# (out, in), as torch.nn.Linear holds its weight.
GPT2_SMALL_BLOCK: list[Shape] = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]

WORKLOADS: dict[str, list[Shape]] = {
    "pairs": [(512, 512), (512, 2048)] * 12,
    "gpt2": GPT2_SMALL_BLOCK * 12,
    # For tests: nothing about its times is of interest.
    "tiny": [(32, 64), (64, 64), (64, 32)] * 2,
}

WORKLOADS_IN_WORDS = {
    "pairs": "12 x (512x512 + 512x2048)",
    "gpt2": "GPT-2 small's 48 matrices",
    "tiny": "6 tiny matrices",
}

LAYOUTS: dict[str, str] = {
    "shard": "FSDP2: Shard(0)",
    "replicate": "Replicate",
    "hsdp": "HSDP: (Replicate, Shard(0)), 2 replicas",
    "fsdp_tp": "FSDP2 x TP: (_StridedShard(0), Shard(0)) and (Shard(0), Shard(1))",
    "fsdp1": "FSDP1: FULL_SHARD, use_orig_params=True",
    "ddp": "DDP",
}
_GRIDS = ("hsdp", "fsdp_tp")

IMPLEMENTATIONS = {
    "ours": "Muon(distributed_config=...); ours-p has prefetch_count=p",
    "stock": "the Muon that the overlay replaced, on the same parameters",
    "allgather": "bf16 all-gather of each matrix, Newton-Schulz of all on every rank",
    "muon_fsdp2": "PyPI's muon-fsdp2 on copies of the parameters, one owner a matrix, several in flight",
    "adamw": "AdamW(foreach=True)",
}
# Of those, packages that need not be there.
PEERS = ("muon_fsdp2",)


def fits(layout: str, world: int) -> bool:
    """Two dimensions of a mesh want at least two ranks each."""
    return layout not in _GRIDS or (world >= 4 and world % 2 == 0)


def names_for(layout: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``names`` that can do with ``layout``."""
    refused = {"fsdp1": {"stock"}}.get(layout, set())
    if layout != "shard":
        # It puts all ranks' parts together by rows, and has nothing for two dimensions.
        refused = refused | {"muon_fsdp2"}
    return tuple(n for n in names if n not in refused)


def prefetch_of(name: str) -> int:
    """``ours`` with ``prefetch_count`` p is named ``ours-p``."""
    return int(name.removeprefix("ours-"))


@dataclass(frozen=True)
class Job:
    """What one set of processes does."""

    layout: str
    workload: str
    names: tuple[str, ...]  # implementations; the first is one of ours
    cores: int
    reps: int = 1
    patience: float = 0.0  # seconds to spend on waiting for a quiet machine
    profile: bool = False
