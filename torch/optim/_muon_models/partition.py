"""Which parameters of a model are hidden matrices for Muon, and why the others are not."""

import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from .._muon_engine.layouts import fsdp1, fsdp2
from .._muon_engine.layouts.layout import matrix_shape
from .._muon_engine.process_groups import listed, process_rank
from .._muon_split import Split


# Names that torch.compile and PEFT put between a model and its layers, and weight_norm before a parameter.
_WRAPPERS = r"\b(_orig_mod|base_layer|original_module|modules_to_save\.\w+)\."
_PARAMETRIZED = r"\bparametrizations\.\w+\.(?=original)"
# Layers of a block differ in their numbers only.
_NUMBER = re.compile(r"\b\d+\b")
# An element of a list that is in no other list.
_LISTED = r"[^*]*\*(\.weight)?"
# Names that models give to the layer that computes logits, or to the module around it.
_HEAD = r"class_embed|classifier|embed_out|(lm_)?head|output_layer|qa_outputs|score|unembed(ding)?"
# Inside blocks, hidden layers have such names as well, and attention has heads.
_HEAD_OUTSIDE = (
    r"(?i)heads|heads?_\w+|\w+_(heads?|classifier|class_embed)|\w*logits(_proj)?"
)
# How many times as many columns as rows a matrix with few rows has.
FEW = 8
# Of parameters without a linear layer: tables of positions and tokens, biases, gains of heads, Mamba's A_log.
_TABLE = r"(^|_)(pos(?!t)|table|tokens?$|latent(s|_quer)|gain|gamma|scale)|norm|embed|bias|_log$"
_POSITIONS = r"(^|_)(pos(?!t)|table)"
_QUERIES = r"quer(y|ies)"
# Layers that have several matrices in one.
_FUSED = r"kv|key_value|c_attn|att_proj|gate_up|input_linear|mlp1_weight|w1[23]|\bWi\b|\bin_proj"
_EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
_CONVOLUTIONS = nn.modules.conv._ConvNd
_GATED = nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell


def partition(
    module: nn.Module,
    exclude: str | Sequence[str],
    verbose: bool,
    split: Mapping[str, Any] | None,
    takes_stacks: bool,
) -> tuple[list, list]:
    """The parameters for Muon and the rest: :func:`torch.optim.muon.partition_named_parameters`."""
    fsdp2.check_resharded(module)
    tensors = list(fsdp1.logical_matrices(module))
    shapes = {name: tuple(shape) for _, _, inside in tensors for name, shape in inside}
    patterns = [exclude] if isinstance(exclude, str) else exclude
    excluded = {name for pattern in patterns for name in _matches(pattern, shapes)}
    forms = dict.fromkeys(shapes, (Split(), False))
    for pattern, value in (split or {}).items():
        for name in _matches(pattern, shapes) - excluded:
            forms[name] = _form(Split.of(value), shapes[name])
    model, groups, others = _Model(module, shapes, takes_stacks), {}, []
    unused: list[str] = []
    for name, param, inside in tensors:
        reasons = {n: model.why_not(n, forms[n][1]) for n, _ in inside}
        reasons |= dict.fromkeys(reasons.keys() & excluded, "excluded")
        if id(param) in model.tied:
            reasons = dict.fromkeys(reasons, "embedding")
        unused += [n for n, why in reasons.items() if why and forms[n][0].sizes]
        kinds = {() if why else forms[n] for n, why in reasons.items()}
        if len(kinds) > 1:
            kind_of = {w or _described(n, *forms[n]): n for n, w in reasons.items()}
            raise fsdp1.mixed(name, kind_of)
        (kind,) = kinds
        (groups.setdefault(kind, []) if kind else others).append((name, param))
        for n, shape in inside if verbose and process_rank() == 0 else ():
            why = f"rest: {reasons[n]}"
            if not reasons[n]:
                # A head that its size does not give away. The user knows.
                mark = ", few rows" * (n in model.few)
                why = _described(n, *forms[n]) + mark
            print(f"{n} {tuple(shape)} -> {why}")
    if unused and process_rank() == 0:
        warnings.warn(f"not for Muon, so not split: {listed(unused)}", stacklevel=3)
    kernels = [name for name in shapes if model.is_kernel(name)]
    if kernels and not groups and process_rank() == 0:
        warnings.warn(
            f"this model has no hidden matrix, but kernels: {listed(kernels)}. For Muon, put kernels into a parameter group with "
            "flatten=True, which makes each one matrix",
            stacklevel=3,
        )
    if split is None:
        return [pair for group in groups.values() for pair in group], others
    matrices = [
        {"params": params, "split": of_group.option or None, "flatten": flatten}
        for (of_group, flatten), params in groups.items()
    ]
    return matrices, others


def _form(split: Split, shape: tuple[int, ...]) -> tuple[Split, bool]:
    """``split``, and whether it is for the flattened parameter and not for the matrices of a stack."""
    if len(shape) < 2:
        return Split(), False
    is_stack = len(shape) == 2 or not split.problem_with(shape[-2:])
    return split, not is_stack and not split.problem_with(matrix_shape(shape, True))


def _described(name: str, split: Split, flatten: bool) -> str:
    suffix = f", split {split.option}" if split.sizes else ""
    if not suffix and _is_fused(name):
        suffix = ", left whole: named like a fused weight"
    return f"Muon{suffix}" + ", flattened" * flatten


def _matches(pattern: str, names: Mapping[str, object]) -> set[str]:
    """The names that a pattern matches, with or without torch.compile's part of them."""
    if pattern in names:
        return {pattern}
    plain = {name: name.replace("_orig_mod.", "") for name in names}
    hits = {n for n in names if fnmatch(n, pattern) or fnmatch(plain[n], pattern)}
    if not hits:
        patterns = {_NUMBER.sub("*", name) for name in plain.values()}
        near = get_close_matches(pattern, sorted(patterns), cutoff=0.0)
        raise ValueError(f"no parameter matches {pattern!r}; near names are {near}")
    return hits


def unwrapped(name: str) -> str:
    """``name`` without what wrappers of models and layers put into it."""
    return re.sub(_WRAPPERS, "", clean_tensor_name(name))


def _is_fused(name: str) -> bool:
    """Whether a weight is named as if it had several matrices in one."""
    return re.search(_FUSED, ".".join(unwrapped(name).split(".")[-3:])) is not None


def _is_router(unit: str) -> bool:
    return any("router" in part for part in unit.split(".")[-3:])


class _Param(NamedTuple):
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
        if isinstance(self.module, _CONVOLUTIONS):
            return (self.module.in_channels,)
        return self.shape[1:]

    @property
    def given(self) -> tuple[int, ...]:
        """How many features it gives."""
        if isinstance(self.module, _CONVOLUTIONS):
            return (self.module.out_channels,)
        return self.shape[:1] if len(self.shape) == 2 else self.shape[1:]

    @property
    def places(self) -> set[str]:
        """The layer and the module around it: one of the two holds the experts of a router."""
        return {self.layer, self.layer.rpartition(".")[0]}


class _Sizes:
    """Which layers take and give how many features, and which matrices are single in their model."""

    def __init__(self, layers: Sequence[_Param], embeddings: Sequence[Any]) -> None:
        """``layers`` are in the order of the model."""
        self.matrices = [p for p in layers if len(p.shape) == 2]
        self.places = {p.unit: place for place, p in enumerate(layers)}
        self.vocabularies = {m.num_embeddings for m in embeddings}
        self._starred = {p.unit: _NUMBER.sub("*", p.unit) for p in layers}
        self._blocks = Counter((self._starred[p.unit], p.shape) for p in layers)
        self.takers: defaultdict[int, list[_Param]] = defaultdict(list)
        # How many features the model has inside. A layer with few rows is a bottleneck or a head.
        self.hidden = {m.embedding_dim for m in embeddings}
        for layer in layers:
            for size in layer.taken:
                self.takers[size].append(layer)
            if not layer.has_few_rows:
                self.hidden.update(layer.given)
        convolutions = [p for p in layers if isinstance(p.module, _CONVOLUTIONS)]
        self.is_convolutional = len(convolutions) > len(self.matrices)

    def is_listed(self, p: _Param) -> bool:
        """Whether a layer is an element of a list that is in no block."""
        return re.fullmatch(_LISTED, self._starred[p.unit]) is not None

    def is_single(self, p: _Param) -> bool:
        """Whether no other block has such a layer."""
        return self._blocks[self._starred[p.unit], p.shape] == 1

    def is_outside(self, p: _Param) -> bool:
        """Whether a layer is single, and in no block."""
        return self.is_single(p) and (
            "*" not in self._starred[p.unit] or self.is_listed(p)
        )

    def why_head(self, p: _Param) -> str:
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
        is_narrow = rows < p.shape[1] and not _is_fused(p.name)
        if self.is_convolutional and is_narrow and not takers:
            return "output head: no convolution takes its rows"
        return ""

    def _is_first(self, taker: _Param, p: _Param) -> bool:
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


class _Model:
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
        layers = [p for p in every if not isinstance(p.module, _EMBEDDINGS)]
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
            if len(p.shape) == 3 and not isinstance(p.module, _CONVOLUTIONS):
                experts[p.shape[0]] |= p.places
        wide = [p for p in matrices if p.shape[0] < p.shape[1]]
        self.routers = {p.unit for p in wide if experts[p.shape[0]] & p.places}
        # One with rows for shared experts, too, has another number of them.
        self.routers |= {p.unit for p in wide if "Router" in type(p.module).__name__}
        # With expert parallelism, a stack may have a part of the experts.
        routers = [p for p in matrices if p.unit in self.routers or _is_router(p.unit)]
        self.n_experts = {p.shape[0] for p in routers}
        embeddings = [m for _, m in named if isinstance(m, _EMBEDDINGS)]
        self.tied = {id(p) for m in embeddings for p in m.parameters(recurse=False)}
        self.sizes = _Sizes(own, embeddings)
        self.heads = {p.unit: self.sizes.why_head(p) for p in matrices}
        self.few = {p.name for p in matrices if p.has_few_rows}

    def _param(self, name: str, shape: tuple[int, ...]) -> _Param:
        unit = unwrapped(name)
        layer = re.sub(_PARAMETRIZED, "", unit).rpartition(".")[0]
        ends = [dot.start() for dot in re.finditer(r"\.|$", layer)]
        adapted = [layer[:end] for end in ends if layer[:end] in self.adapted]
        if adapted:
            unit = layer = adapted[0]
        return _Param(name, shape, self.modules.get(layer), layer, unit)

    def is_kernel(self, name: str) -> bool:
        """Whether a parameter is the weight of a convolution."""
        param = self.params[name]
        return isinstance(param.module, _CONVOLUTIONS) and len(param.shape) > 2

    def why_not(self, name: str, flatten: bool) -> str:
        """Why a parameter is not for Muon; "" if it is."""
        _, shape, module, layer, unit = self.params[name]
        leaf = name.split(".")[-1]
        # A module that is not a linear layer may be a table that calls itself a weight.
        if leaf == "weight" and not hasattr(module, "in_features"):
            leaf = "norm" if "Norm" in type(module).__name__ else layer.split(".")[-1]
        is_stack = self.takes_stacks and len(shape) == 3
        is_stack &= not isinstance(module, _CONVOLUTIONS)
        is_stack &= any(n % shape[0] == 0 or "expert" in layer for n in self.n_experts)
        if len(shape) != 2 and not flatten and not is_stack:
            return f"{len(shape)}D"
        if isinstance(module, _EMBEDDINGS):
            return "embedding"
        if re.search(_TABLE, leaf) or self._is_in_table(name):
            return "table, bias or scale"
        if 1 in matrix_shape(shape, flatten):
            return "one row or column"
        if isinstance(module, _GATED) and leaf.startswith(("weight_ih", "weight_hh")):
            return f"gates of {type(module).__name__}"
        if _is_router(unit):
            return "router"
        parts = layer.split(".")
        block = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
        heads = [part for part in parts if re.fullmatch(_HEAD, part)]
        heads += [
            part
            for place, part in enumerate(parts[:block])
            if re.fullmatch(_HEAD_OUTSIDE, part)
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
        if re.fullmatch(_QUERIES, leaf):
            return True
        if leaf == "weight" or hasattr(module, "in_features"):
            return False
        return re.search(_POSITIONS, layer.split(".")[-1]) is not None
