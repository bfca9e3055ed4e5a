"""Which models, over which meshes, on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import meshes
from torch.testing._internal.distributed._muon.model_shapes import MODELS


if TYPE_CHECKING:
    from torch.optim._muon_engine.layouts import Layout


@dataclass(frozen=True)
class Case:
    """A model over a mesh of ``outer`` x ``inner`` ranks, of which ``inner`` are neighbours.

    ``inner`` are the shards of a replica (HSDP), the ranks of TP, or those of EP.
    """

    model: str
    kind: str
    outer: int
    inner: int = 1

    @property
    def world(self) -> int:
        return self.outer * self.inner

    @property
    def mesh(self) -> str:
        if self.kind == "fsdp":
            return "FSDP"
        sizes = f"{self.outer} x {self.inner}"
        return {"hsdp": "HSDP", "tp": "FSDP x TP", "ep": "FSDP x EP"}[
            self.kind
        ] + f" {sizes}"

    def layouts(self) -> list[Layout]:
        model = MODELS[self.model]
        if self.kind == "fsdp":
            return meshes.fsdp(model, self.world)
        if self.kind == "hsdp":
            return meshes.hsdp(model, self.outer, self.inner)
        if self.kind == "tp":
            return meshes.fsdp_tp(model, self.world)
        return meshes.ep_fsdp(model, self.world, self.inner)

    def one_replica(self) -> Case | None:
        """The part of the mesh that holds everything once, if that is not all of it."""
        return Case(self.model, "hsdp", 1, self.inner) if self.kind == "hsdp" else None


CASES = (
    Case("GPT-2 124M", "fsdp", 8),
    Case("GPT-2 124M", "hsdp", 8, 8),
    Case("Llama 3 8B", "fsdp", 64),
    Case("Llama 3 8B", "hsdp", 64, 8),
    Case("Llama 3 8B", "tp", 16, 8),
    Case("Llama 3 70B", "fsdp", 64),
    Case("Llama 3 70B", "fsdp", 256),
    Case("Llama 3 70B", "fsdp", 2048),
    Case("Llama 3 70B", "hsdp", 4, 64),
    Case("Llama 3 70B", "hsdp", 16, 64),
    Case("Llama 3 70B", "tp", 32, 8),
    Case("Llama 3 70B", "tp", 256, 8),
    Case("Llama 3 405B", "fsdp", 512),
    Case("Llama 3 405B", "tp", 64, 8),
    Case("Llama 3 405B", "hsdp", 32, 512),
    Case("Llama 3 405B", "tp", 2048, 8),
    Case("Qwen3-235B-A22B", "fsdp", 256),
    Case("Qwen3-235B-A22B", "ep", 4, 64),
    Case("Qwen3-235B-A22B", "ep", 32, 64),
    Case("DeepSeek-V3", "fsdp", 512),
    Case("DeepSeek-V3", "ep", 8, 64),
    Case("DeepSeek-V3", "ep", 32, 64),
    Case("Kimi K2", "ep", 32, 64),
    Case("Kimi K2", "ep", 256, 64),
)
