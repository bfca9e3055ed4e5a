"""Which layers take and give how many features, and the output heads that follow."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from .names import is_fused, NUMBER
from .parameter import CONVOLUTIONS, FEW, ModelParameter


# An element of a list that is in no other list.
_LISTED = r"[^*]*\*(\.weight)?"


class LayerSizes:
    """Which layers take and give how many features, and which matrices are single in their model."""

    def __init__(
        self, layers: Sequence[ModelParameter], embeddings: Sequence[Any]
    ) -> None:
        """``layers`` are in the order of the model."""
        self.matrices = [p for p in layers if len(p.shape) == 2]
        self.places = {p.unit: place for place, p in enumerate(layers)}
        self.vocabularies = {m.num_embeddings for m in embeddings}
        self._starred = {p.unit: NUMBER.sub("*", p.unit) for p in layers}
        self._blocks = Counter((self._starred[p.unit], p.shape) for p in layers)
        self.takers: defaultdict[int, list[ModelParameter]] = defaultdict(list)
        # How many features the model has inside. A layer with few rows is a bottleneck or a head.
        self.hidden = {m.embedding_dim for m in embeddings}
        for layer in layers:
            for size in layer.taken:
                self.takers[size].append(layer)
            if not layer.has_few_rows:
                self.hidden.update(layer.given)
        convolutions = [p for p in layers if isinstance(p.module, CONVOLUTIONS)]
        self.is_convolutional = len(convolutions) > len(self.matrices)

    def is_listed(self, p: ModelParameter) -> bool:
        """Whether a layer is an element of a list that is in no block."""
        return re.fullmatch(_LISTED, self._starred[p.unit]) is not None

    def is_single(self, p: ModelParameter) -> bool:
        """Whether no other block has such a layer."""
        return self._blocks[self._starred[p.unit], p.shape] == 1

    def is_outside(self, p: ModelParameter) -> bool:
        """Whether a layer is single, and in no block."""
        return self.is_single(p) and (
            "*" not in self._starred[p.unit] or self.is_listed(p)
        )

    def why_head(self, p: ModelParameter) -> str:
        """Why a matrix is an output head, by its size; "" if it is not."""
        rows, takers = p.shape[0], self.takers[p.shape[0]]
        # A list of heads, each for another token, is no list of blocks.
        if rows in self.vocabularies and not takers:
            if self.is_single(p) or self.is_listed(p):
                return "output head: as many rows as an embedding"
        # An MLP of the last head may be in a list, whose other elements are the same module.
        is_last = p is self.matrices[-1] and self.is_single(p)
        if not (is_last or self.is_outside(p)):
            return ""
        if p.has_few_rows:
            # A model that gives what it gets, as in diffusion, has a first layer with as many columns.
            firsts = [t for t in takers if self._is_first(t, p)]
            return "output head: few rows" if len(firsts) == len(takers) else ""
        is_narrow = rows < p.shape[1] and not is_fused(p.name)
        if self.is_convolutional and is_narrow and not takers:
            return "output head: no convolution takes its rows"
        return ""

    def _is_first(self, taker: ModelParameter, p: ModelParameter) -> bool:
        """Whether ``taker`` takes what the model gets, and not what ``p`` gives: ``p`` comes later."""
        is_earlier = self.places[taker.unit] < self.places[p.unit]
        return is_earlier and self.is_outside(taker) and p.shape[0] not in self.hidden

    def embeds(self, prefix: str) -> bool:
        """Whether a layer of the module ``prefix`` takes a few features that no hidden layer gives, as positions are."""
        inside = [p for p in self.matrices if p.layer.startswith(f"{prefix}.")]
        return any(
            p.shape[0] >= FEW * p.shape[1] and p.shape[1] not in self.hidden
            for p in inside
        )
