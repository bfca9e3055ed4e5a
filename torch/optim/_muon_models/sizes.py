"""How many features the layers of a model take and give, and which layers are in a block."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from .names import without_numbers
from .parameters import Embedding, ModelParameter


# The name, without its numbers, of an element of a list that is in no other list. Blocks are such a list, too.
_ELEMENT_OF_ONE_LIST = re.compile(r"[^*]*\*(\.weight)?")


class LayerSizes:
    """The features that layers take and give, and the place of each layer."""

    def __init__(
        self, layers: Sequence[ModelParameter], embeddings: Sequence[Embedding]
    ) -> None:
        """``layers`` are in the order of the model, without embeddings and adapters."""
        self.vocabularies: set[int] = set()
        # The features inside the model. A layer with few rows does not count: it is a bottleneck or a head.
        self.hidden_features: set[int] = set()
        for embedding in embeddings:
            self.vocabularies.add(embedding.num_embeddings)
            self.hidden_features.add(embedding.embedding_dim)
        self.matrices: list[ModelParameter] = []
        self._consumers: defaultdict[int, list[ModelParameter]] = defaultdict(list)
        self._position: dict[str, int] = {}
        self._similar_layers = Counter(map(_in_any_block, layers))
        convolution_count = 0
        for position, layer in enumerate(layers):
            self._position[layer.unit] = position
            for features in layer.input_features:
                self._consumers[features].append(layer)
            if not layer.has_few_rows:
                self.hidden_features.update(layer.output_features)
            if layer.is_matrix:
                self.matrices.append(layer)
            if layer.is_convolution:
                convolution_count += 1
        self.is_convolutional = convolution_count > len(self.matrices)

    def consumers(self, features: int) -> list[ModelParameter]:
        """The layers that take this number of features."""
        return self._consumers[features]

    def is_single(self, layer: ModelParameter) -> bool:
        """Whether no other block has such a layer."""
        return self._similar_layers[_in_any_block(layer)] == 1

    def is_in_one_list(self, layer: ModelParameter) -> bool:
        """Whether a layer is an element of a list that is in no block."""
        name_without_numbers = without_numbers(layer.unit)
        return _ELEMENT_OF_ONE_LIST.fullmatch(name_without_numbers) is not None

    def is_outside_of_blocks(self, layer: ModelParameter) -> bool:
        """Whether a layer is single, and in no block."""
        if not self.is_single(layer):
            return False
        is_in_a_list = "*" in without_numbers(layer.unit)
        return not is_in_a_list or self.is_in_one_list(layer)

    def is_first_layer(self, consumer: ModelParameter, head: ModelParameter) -> bool:
        """Whether ``consumer`` takes what the model gets, and not what ``head`` gives, which comes later."""
        is_earlier = self._position[consumer.unit] < self._position[head.unit]
        if not is_earlier or not self.is_outside_of_blocks(consumer):
            return False
        return head.shape[0] not in self.hidden_features

    def has_embedder(self, module_name: str) -> bool:
        """Whether a layer inside a module takes a few features that no hidden layer gives, as positions are."""
        for matrix in self.matrices:
            is_inside = matrix.layer.startswith(f"{module_name}.")
            if is_inside and matrix.has_few_columns:
                if matrix.shape[1] not in self.hidden_features:
                    return True
        return False


def _in_any_block(layer: ModelParameter) -> tuple[str, tuple[int, ...]]:
    """Equal for the same layer of different blocks."""
    return without_numbers(layer.unit), layer.shape
