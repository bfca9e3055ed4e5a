"""A parameter of a model, and the layer that has it."""

from typing import NamedTuple

from torch import nn


# How many times as many columns as rows a matrix with few rows has.
FEW = 8
EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
CONVOLUTIONS = nn.modules.conv._ConvNd


class ModelParameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    module: nn.Module | None
    layer: str
    # The name of the layer, for its adapters as well, because they go where their layer goes.
    unit: str

    @property
    def has_few_rows(self) -> bool:
        return len(self.shape) == 2 and self.shape[1] >= FEW * self.shape[0]

    @property
    def taken(self) -> tuple[int, ...]:
        """How many features it takes: of a stack, which may be transposed, either of two numbers."""
        if isinstance(self.module, CONVOLUTIONS):
            return (self.module.in_channels,)
        return self.shape[1:]

    @property
    def given(self) -> tuple[int, ...]:
        """How many features it gives."""
        if isinstance(self.module, CONVOLUTIONS):
            return (self.module.out_channels,)
        return self.shape[:1] if len(self.shape) == 2 else self.shape[1:]

    @property
    def places(self) -> set[str]:
        """The layer and the module around it: one of the two holds the experts of a router."""
        return {self.layer, self.layer.rpartition(".")[0]}
