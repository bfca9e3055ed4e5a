"""Why a parameter of a model is not for Muon."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from .._muon_engine.layouts.layout import matrix_shape
from .names import (
    HEAD,
    HEAD_OUTSIDE,
    is_router,
    PARAMETRIZED,
    POSITIONS,
    QUERIES,
    TABLE,
    unwrapped,
)
from .parameter import CONVOLUTIONS, EMBEDDINGS, ModelParameter
from .sizes import LayerSizes


_GATED = nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell


class Model:
    """Classifies the parameters of a model: by modules, by shapes, and by names where these do not suffice."""

    def __init__(
        self, module: nn.Module, shapes: Mapping[str, Any], takes_stacks: bool
    ) -> None:
        self.takes_stacks = takes_stacks
        # A wrapped module comes after its wrapper, and replaces it.
        named = [(unwrapped(f"{n}.")[:-1], m) for n, m in module.named_modules()]
        self.modules = dict(named)
        self.adapted = {n for n, m in named if "base_layer" in m._modules}
        self.params = {n: self._param(n, tuple(shape)) for n, shape in shapes.items()}
        every = self.params.values()
        layers = [p for p in every if not isinstance(p.module, EMBEDDINGS)]
        # The rank of an adapter says nothing.
        own = [p for p in layers if p.unit != p.layer or ".base_layer." in p.name]
        matrices = [p for p in own if len(p.shape) == 2]
        self.last = {p.unit for p in matrices[-1:]}
        # Experts are a list of modules, or stacks. Their router has a row for each of them.
        experts: defaultdict[int, set[str]] = defaultdict(set)
        for name, submodule in named:
            if isinstance(submodule, nn.ModuleList):
                experts[len(submodule)].add(name.rpartition(".")[0])
        for p in layers:
            if len(p.shape) == 3 and not isinstance(p.module, CONVOLUTIONS):
                experts[p.shape[0]] |= p.places
        wide = [p for p in matrices if p.shape[0] < p.shape[1]]
        self.routers = {p.unit for p in wide if experts[p.shape[0]] & p.places}
        # One with rows for shared experts, too, has another number of them.
        self.routers |= {p.unit for p in wide if "Router" in type(p.module).__name__}
        # With expert parallelism, a stack may have a part of the experts.
        routers = [p for p in matrices if p.unit in self.routers or is_router(p.unit)]
        self.n_experts = {p.shape[0] for p in routers}
        embeddings = [m for _, m in named if isinstance(m, EMBEDDINGS)]
        self.tied = {id(p) for m in embeddings for p in m.parameters(recurse=False)}
        self.sizes = LayerSizes(own, embeddings)
        self.heads = {p.unit: self.sizes.why_head(p) for p in matrices}
        self.few = {p.name for p in matrices if p.has_few_rows}

    def _param(self, name: str, shape: tuple[int, ...]) -> ModelParameter:
        unit = unwrapped(name)
        layer = re.sub(PARAMETRIZED, "", unit).rpartition(".")[0]
        ends = [dot.start() for dot in re.finditer(r"\.|$", layer)]
        adapted = [layer[:end] for end in ends if layer[:end] in self.adapted]
        if adapted:
            unit = layer = adapted[0]
        return ModelParameter(name, shape, self.modules.get(layer), layer, unit)

    def is_kernel(self, name: str) -> bool:
        """Whether a parameter is the weight of a convolution."""
        param = self.params[name]
        return isinstance(param.module, CONVOLUTIONS) and len(param.shape) > 2

    def why_not(self, name: str, flatten: bool) -> str:
        """Why a parameter is not for Muon; "" if it is."""
        _, shape, module, layer, unit = self.params[name]
        leaf = name.split(".")[-1]
        # A module that is not a linear layer may be a table that calls itself a weight.
        if leaf == "weight" and not hasattr(module, "in_features"):
            leaf = "norm" if "Norm" in type(module).__name__ else layer.split(".")[-1]
        is_stack = self.takes_stacks and len(shape) == 3
        is_stack &= not isinstance(module, CONVOLUTIONS)
        is_stack &= any(n % shape[0] == 0 or "expert" in layer for n in self.n_experts)
        if len(shape) != 2 and not flatten and not is_stack:
            return f"{len(shape)}D"
        if isinstance(module, EMBEDDINGS):
            return "embedding"
        if re.search(TABLE, leaf) or self._is_in_table(name):
            return "table, bias or scale"
        if 1 in matrix_shape(shape, flatten):
            return "one row or column"
        if isinstance(module, _GATED) and leaf.startswith(("weight_ih", "weight_hh")):
            return f"gates of {type(module).__name__}"
        if is_router(unit):
            return "router"
        parts = layer.split(".")
        block = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
        heads = [part for part in parts if re.fullmatch(HEAD, part)]
        heads += [
            part
            for place, part in enumerate(parts[:block])
            if re.fullmatch(HEAD_OUTSIDE, part)
            and not self.sizes.embeds(".".join(parts[: place + 1]))
        ]
        # BERT, RWKV and others have hidden layers of these names in their blocks.
        if parts[-1] == "output" or (parts[-1] == "fc" and unit in self.last):
            heads += parts[-1:] if block == len(parts) else []
        if heads:
            return "output head" + f": in {heads[0]}" * (heads[0] != parts[-1])
        return "router" if unit in self.routers else self.heads.get(unit, "")

    def _is_in_table(self, name: str) -> bool:
        """Whether a bare parameter is a table by the name of its module, or learned queries by its own."""
        _, _, module, layer, _ = self.params[name]
        leaf = name.split(".")[-1]
        if re.fullmatch(QUERIES, leaf):
            return True
        if leaf == "weight" or hasattr(module, "in_features"):
            return False
        return re.search(POSITIONS, layer.split(".")[-1]) is not None
