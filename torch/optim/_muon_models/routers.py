"""Which layers route tokens to experts, and how many experts there are."""

from collections import defaultdict
from collections.abc import Sequence

from torch import nn

from . import names
from .parameters import ModelParameter, NamedModules


class Routers:
    """The routers of a model. A router has a row for each expert."""

    def __init__(
        self,
        modules: NamedModules,
        layers: Sequence[ModelParameter],
        matrices: Sequence[ModelParameter],
    ) -> None:
        """``matrices`` are those of ``layers`` that are no adapters."""
        places = _places_of_experts(modules, layers)
        self._units: set[str] = set()
        for matrix in matrices:
            rows, columns = matrix.shape
            is_next_to_experts = not places[rows].isdisjoint(matrix.surroundings)
            # A router with rows for shared experts, too, has another number of rows than there are experts.
            is_of_router_class = "Router" in type(matrix.module).__name__
            if rows < columns and (is_next_to_experts or is_of_router_class):
                self._units.add(matrix.unit)
        self._expert_counts: set[int] = set()
        for matrix in matrices:
            if matrix.unit in self._units or names.is_router(matrix.unit):
                self._expert_counts.add(matrix.shape[0])

    def has(self, parameter: ModelParameter) -> bool:
        """Whether a parameter is of a router by its size or its class. Names are another question."""
        return parameter.unit in self._units

    def is_stack_of_experts(self, parameter: ModelParameter) -> bool:
        """Whether a parameter has a matrix for each expert of a router."""
        if len(parameter.shape) != 3 or parameter.is_convolution:
            return False
        if "expert" in parameter.layer:
            return bool(self._expert_counts)
        # With expert parallelism, a stack may have a part of the experts.
        matrix_count = parameter.shape[0]
        return any(count % matrix_count == 0 for count in self._expert_counts)


def _places_of_experts(
    modules: NamedModules, layers: Sequence[ModelParameter]
) -> defaultdict[int, set[str]]:
    """Length of a list of modules or of a stack -> the modules that have one of this length."""
    places: defaultdict[int, set[str]] = defaultdict(set)
    for module_name, module in modules:
        if isinstance(module, nn.ModuleList):
            parent_name, _, _ = module_name.rpartition(".")
            places[len(module)].add(parent_name)
    for layer in layers:
        if len(layer.shape) == 3 and not layer.is_convolution:
            places[layer.shape[0]].update(layer.surroundings)
    return places
