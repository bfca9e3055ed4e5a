"""Why a parameter of a model is not for Muon: by modules, by shapes, and by names where these do not suffice."""

from collections.abc import Mapping

from torch import nn

from .._muon_engine.layouts.layout import matrix_shape
from . import names
from .output_heads import OutputHeads
from .parameters import (
    Embedding,
    model_parameters,
    ModelParameter,
    named_modules,
    Shape,
)
from .routers import Routers
from .sizes import LayerSizes


_GATED = nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell


class Model:
    """Classifies the parameters of a model."""

    def __init__(
        self, module: nn.Module, shapes: Mapping[str, Shape], takes_stacks: bool
    ) -> None:
        """``shapes`` has the logical shapes by name. ``takes_stacks``: whether Muon gets stacks of experts."""
        self._takes_stacks = takes_stacks
        modules = named_modules(module)
        self._parameters = model_parameters(modules, shapes)
        layers = []
        for parameter in self._parameters.values():
            if not parameter.is_embedding:
                layers.append(parameter)
        # The rank of an adapter says nothing.
        own_layers = [layer for layer in layers if not layer.is_adapter]
        embeddings = [inner for _, inner in modules if isinstance(inner, Embedding)]
        self._embedding_ids: set[int] = set()
        for embedding in embeddings:
            for tied_parameter in embedding.parameters(recurse=False):
                self._embedding_ids.add(id(tied_parameter))
        sizes = LayerSizes(own_layers, embeddings)
        self._few_rows = {
            matrix.name for matrix in sizes.matrices if matrix.has_few_rows
        }
        self._routers = Routers(modules, layers, sizes.matrices)
        self._output_heads = OutputHeads(sizes)

    def is_tied_to_embedding(self, parameter: nn.Parameter) -> bool:
        """Whether an embedding has this parameter, whatever its name."""
        return id(parameter) in self._embedding_ids

    def has_few_rows(self, tensor_name: str) -> bool:
        """Whether a matrix, which is no adapter's, may be a head that its size does not give away."""
        return tensor_name in self._few_rows

    def is_kernel(self, tensor_name: str) -> bool:
        """Whether a parameter is the weight of a convolution."""
        parameter = self._parameters[tensor_name]
        return parameter.is_convolution and len(parameter.shape) > 2

    def why_not(self, tensor_name: str, flatten: bool) -> str:
        """Why a parameter is not for Muon; "" if it is. ``flatten``: whether it is to be made one matrix."""
        parameter = self._parameters[tensor_name]
        return (
            self._why_no_matrix(parameter, flatten)
            or _why_table(parameter)
            or _why_vector(parameter, flatten)
            or _why_gates(parameter)
            or self._why_router_or_head(parameter)
        )

    def _why_no_matrix(self, parameter: ModelParameter, flatten: bool) -> str:
        if parameter.is_matrix or flatten:
            return ""
        if self._takes_stacks and self._routers.is_stack_of_experts(parameter):
            return ""
        return f"{len(parameter.shape)}D"

    def _why_router_or_head(self, parameter: ModelParameter) -> str:
        if names.is_router(parameter.unit):
            return "router"
        reason = self._output_heads.by_name(parameter)
        if reason:
            return reason
        if self._routers.has(parameter):
            return "router"
        return self._output_heads.by_size(parameter)


def _why_table(parameter: ModelParameter) -> str:
    if parameter.is_embedding:
        return "embedding"
    if names.is_table(_telling_name(parameter)) or _is_in_table(parameter):
        return "table, bias or scale"
    return ""


def _why_vector(parameter: ModelParameter, flatten: bool) -> str:
    if 1 in matrix_shape(parameter.shape, flatten):
        return "one row or column"
    return ""


def _why_gates(parameter: ModelParameter) -> str:
    is_fused = parameter.own_name.startswith(("weight_ih", "weight_hh"))
    if is_fused and isinstance(parameter.module, _GATED):
        return f"gates of {type(parameter.module).__name__}"
    return ""


def _telling_name(parameter: ModelParameter) -> str:
    """The name that says whether a parameter is a table: its own one, or that of its module."""
    if parameter.own_name != "weight" or _is_linear(parameter.module):
        return parameter.own_name
    # A module that is not a linear layer may be a table that calls itself a weight.
    if "Norm" in type(parameter.module).__name__:
        return "norm"
    return parameter.layer_own_name


def _is_in_table(parameter: ModelParameter) -> bool:
    """Whether a bare parameter is a table by the name of its module, or learned queries by its own."""
    if names.is_queries(parameter.own_name):
        return True
    if parameter.own_name == "weight" or _is_linear(parameter.module):
        return False
    return names.is_table_of_positions(parameter.layer_own_name)


def _is_linear(module: nn.Module | None) -> bool:
    return hasattr(module, "in_features")
