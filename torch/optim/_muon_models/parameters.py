"""The parameters of a model, and the layer that has each of them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from .names import layer_of, unwrapped, unwrapped_module


Shape = tuple[int, ...]
NamedModules = list[tuple[str, nn.Module]]

Embedding = nn.Embedding | nn.EmbeddingBag
_Convolution = nn.modules.conv._ConvNd
# A matrix has few rows if it has at least this many columns for each of them.
_COLUMNS_PER_ROW = 8


class ModelParameter(NamedTuple):
    """A parameter, and the layer that has it."""

    name: str
    shape: Shape
    # None if wrappers hide it.
    module: nn.Module | None
    layer: str
    # The unwrapped name of the parameter. An adapted layer and its adapters are one unit, which has the layer's name,
    # because they go to one optimizer.
    unit: str

    @property
    def own_name(self) -> str:
        """The last part of the name."""
        return self.name.split(".")[-1]

    @property
    def layer_own_name(self) -> str:
        """The last part of the layer's name."""
        return self.layer.split(".")[-1]

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, Embedding)

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.module, _Convolution)

    @property
    def is_adapter(self) -> bool:
        """Whether PEFT put the parameter next to the layer that it adapts."""
        is_adapted = self.unit == self.layer
        return is_adapted and ".base_layer." not in self.name

    @property
    def has_few_rows(self) -> bool:
        if not self.is_matrix:
            return False
        rows, columns = self.shape
        return columns >= _COLUMNS_PER_ROW * rows

    @property
    def has_few_columns(self) -> bool:
        if not self.is_matrix:
            return False
        rows, columns = self.shape
        return rows >= _COLUMNS_PER_ROW * columns

    @property
    def input_features(self) -> Shape:
        """How many features the layer takes. A stack may be transposed, so it has either of two numbers."""
        if isinstance(self.module, _Convolution):
            return (self.module.in_channels,)
        return self.shape[1:]

    @property
    def output_features(self) -> Shape:
        """How many features the layer gives; of a stack, either of two numbers."""
        if isinstance(self.module, _Convolution):
            return (self.module.out_channels,)
        if self.is_matrix:
            return self.shape[:1]
        return self.shape[1:]

    @property
    def surroundings(self) -> set[str]:
        """The layer and the module around it: one of the two holds the experts of a router."""
        module_name, _, _ = self.layer.rpartition(".")
        return {self.layer, module_name}


def named_modules(module: nn.Module) -> NamedModules:
    """The modules by their unwrapped names. A wrapped module comes after its wrapper, with the same name."""
    return [
        (unwrapped_module(module_name), inner)
        for module_name, inner in module.named_modules()
    ]


def model_parameters(
    modules: NamedModules, shapes: Mapping[str, Shape]
) -> dict[str, ModelParameter]:
    """Name -> parameter, for the names in ``shapes``."""
    # A wrapped module replaces its wrapper.
    module_of_layer = dict(modules)
    # PEFT's name for a layer that has adapters.
    adapted_layers = {
        name for name, module in modules if "base_layer" in module._modules
    }
    parameters = {}
    for name, shape in shapes.items():
        unit = unwrapped(name)
        layer = layer_of(unit)
        for prefix in _prefixes(layer):
            if prefix in adapted_layers:
                unit = layer = prefix
                break
        module = module_of_layer.get(layer)
        parameters[name] = ModelParameter(name, shape, module, layer, unit)
    return parameters


def _prefixes(layer_name: str) -> Iterator[str]:
    """The names of the modules around a layer, from the outside, and its own name."""
    name_parts = layer_name.split(".")
    for depth in range(1, len(name_parts) + 1):
        yield ".".join(name_parts[:depth])
