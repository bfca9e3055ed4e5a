"""Which layers are output heads, by their sizes and by their names."""

from collections.abc import Sequence

from .names import is_fused, is_output_head, is_output_head_outside_of_blocks
from .parameters import ModelParameter
from .sizes import LayerSizes


class OutputHeads:
    """The layers that compute what a model returns: logits, classes, boxes or patches."""

    def __init__(self, sizes: LayerSizes) -> None:
        self._sizes = sizes
        self._last_matrix: ModelParameter | None = None
        if sizes.matrices:
            self._last_matrix = sizes.matrices[-1]
        # Unit -> reason. The adapters of a layer are of the layer's unit.
        self._reasons: dict[str, str] = {}
        for matrix in sizes.matrices:
            self._reasons[matrix.unit] = self._reason_of_sizes(matrix)

    def by_size(self, parameter: ModelParameter) -> str:
        """Why a parameter is of an output head by its size; "" if it is not."""
        return self._reasons.get(parameter.unit, "")

    def by_name(self, parameter: ModelParameter) -> str:
        """Why a parameter is of an output head by the name of its layer; "" if it is not."""
        head_name = self._head_in_name(parameter)
        if not head_name:
            return ""
        if head_name == parameter.layer_own_name:
            return "output head"
        return f"output head: in {head_name}"

    def _reason_of_sizes(self, matrix: ModelParameter) -> str:
        """Why a matrix is an output head; "" if it is not."""
        if self._is_vocabulary(matrix):
            return "output head: as many rows as an embedding"
        # An MLP of the last head may be in a list, whose other elements are the same module.
        is_last = matrix is self._last_matrix and self._sizes.is_single(matrix)
        if not is_last and not self._sizes.is_outside_of_blocks(matrix):
            return ""
        consumers = self._sizes.consumers(matrix.shape[0])
        if matrix.has_few_rows:
            # A model that gives what it gets, as in diffusion, has a first layer with as many columns.
            if self._are_first_layers(consumers, matrix):
                return "output head: few rows"
        elif self._sizes.is_convolutional and not consumers:
            rows, columns = matrix.shape
            if rows < columns and not is_fused(matrix.name):
                return "output head: no convolution takes its rows"
        return ""

    def _is_vocabulary(self, matrix: ModelParameter) -> bool:
        """Whether a matrix has a row for each token, and no layer takes its rows."""
        rows = matrix.shape[0]
        if rows not in self._sizes.vocabularies or self._sizes.consumers(rows):
            return False
        # A list of heads, each for another token, is no list of blocks.
        return self._sizes.is_single(matrix) or self._sizes.is_in_one_list(matrix)

    def _are_first_layers(
        self, consumers: Sequence[ModelParameter], head: ModelParameter
    ) -> bool:
        """Whether each of ``consumers``, of which there may be none, takes what the model gets."""
        return all(self._sizes.is_first_layer(consumer, head) for consumer in consumers)

    def _head_in_name(self, parameter: ModelParameter) -> str:
        """The part of a layer's name that says that the layer is an output head or in one; "" without such a part."""
        name_parts = parameter.layer.split(".")
        for name_part in name_parts:
            if is_output_head(name_part):
                return name_part
        parts_outside_of_blocks = _before_number(name_parts)
        for depth, name_part in enumerate(parts_outside_of_blocks, 1):
            if is_output_head_outside_of_blocks(name_part):
                module_name = ".".join(name_parts[:depth])
                if not self._sizes.has_embedder(module_name):
                    return name_part
        # BERT, RWKV and others have hidden layers of the names below in their blocks.
        if parts_outside_of_blocks != name_parts:
            return ""
        own_name = parameter.layer_own_name
        if own_name == "output":
            return own_name
        if own_name == "fc" and self._is_last(parameter):
            return own_name
        return ""

    def _is_last(self, parameter: ModelParameter) -> bool:
        """Whether a parameter is of the last layer."""
        if self._last_matrix is None:
            return False
        return parameter.unit == self._last_matrix.unit


def _before_number(name_parts: list[str]) -> list[str]:
    """The parts of a name before the first number, from which on it is about blocks or a list."""
    for depth, name_part in enumerate(name_parts):
        if name_part.isdigit():
            return name_parts[:depth]
    return name_parts
