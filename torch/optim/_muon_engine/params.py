"""An optimizer's parameters on this rank, the matrices in them, and who inherits the momentum of replaced ones."""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from .._muon_split import Split
from .local import is_dtensor, is_sum, traits_of
from .process_groups import process_rank
from .regions import Layout, newton_schulz_flops, problem_with_tiling, Region, Shape


States = MutableMapping[Tensor, MutableMapping[str, Any]]


class Param:
    """A parameter on this rank, as it was when the engine was built. ``formulas`` (a MuonFormulas) has the options of its
    parameter group, the ``param_group``-th one, at that time.
    """

    def __init__(
        self,
        index: int,
        tensor: Tensor,
        name: str | None = None,
        param_group: int = 0,
        formulas: Any = None,
    ) -> None:
        self.index, self.tensor, self.name = index, tensor, name
        self.param_group, self.formulas = param_group, formulas
        # Its index when the optimizer got it, which the config's dicts count by.
        self.config_index = index
        # The id of its expert, which the config may know.
        self.expert: int | None = None
        # How it becomes matrices.
        self.split, self.flatten = Split(), False
        if formulas is not None:
            self.split, self.flatten = formulas.form
        # The properties that the layout is read from. Every step compares them.
        self.traits = traits_of(tensor)
        self.frozen = self.traits.frozen
        # A DTensor does not see writes to its local tensor.
        self.is_dtensor = is_dtensor(tensor)
        # Whether ranks hold contributions to a sum.
        self.is_sum = is_sum(tensor)

    @property
    def place_of_expert(self) -> int:
        """The place of its expert in the order of all ranks. Experts come last, by their ids."""
        return -1 if self.expert is None else self.expert

    @property
    def described(self) -> str:
        return describe(self, self.tensor.shape)

    def with_tensor(self, tensor: Tensor) -> "Param":
        """``tensor`` in the place of this one."""
        param = Param(self.index, tensor, self.name, self.param_group, self.formulas)
        param.config_index, param.expert = self.config_index, self.expert
        return param


def shared_name(param: Param, name: str | None) -> str:
    """The name that ranks compare. They may name the modules of an expert differently."""
    return str(name) if param.expert is None else f"expert {param.expert}"


def describe(
    param: Param, shape: Sequence[int], sub: int = 0, inside: str | None = None
) -> str:
    """A parameter, the ``sub``-th matrix of it, or the tensor of this name ``inside`` it, in words, with its ``shape``."""
    text = f"parameter {param.index}"
    name = param.name or inside
    if name is not None:
        text += f" {name!r}"
    if sub:
        text += f", its matrix {sub},"
    if param.expert is not None:
        text += f", expert {param.expert},"
    return f"{text} of shape {tuple(shape)}"


# Compared by identity, as there are many.
@dataclass(frozen=True, eq=False)
class Matrix:
    """The ``sub``-th matrix of a parameter. ``placement`` names the placements or groups, for errors. ``inside`` is the name
    that FSDP1 knows of a tensor in a flat parameter. The owner of a matrix with a split orthogonalizes its parts.
    """

    param: Param
    shape: Shape
    layout: Layout
    placement: str = ""
    sub: int = 0
    inside: str | None = None

    # Steps ask for these often.
    @cached_property
    def index(self) -> int:
        return self.param.index

    @property
    def name(self) -> str | None:
        return self.param.name or self.inside

    @cached_property
    def split(self) -> Split:
        return self.param.split

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def flops(self) -> int:
        """The work of its owner: five quintic steps of each part."""
        return sum(map(newton_schulz_flops, self.split.shapes_of_parts(self.shape)))

    @property
    def described(self) -> str:
        return describe(self.param, self.shape, self.sub, self.inside)


def not_2d(described: str) -> ValueError:
    """The error for a parameter that holds no matrix, in upstream's words."""
    return ValueError(f"Muon only supports 2D parameters whereas we found {described}")


def matrix_shape(shape: Sequence[int], flatten: bool) -> Shape:
    """The shape of a matrix in a parameter: dimension 0 by all others, or else the last two."""
    if flatten:
        return shape[0], math.prod(shape[1:])
    return shape[-2], shape[-1]


def own_layout(regions: Sequence[Region]) -> Layout:
    """The layout of a matrix of which this rank stores ``regions``, before it knows those of other ranks."""
    return Layout(((process_rank(),),), (tuple(regions),))


def whole_matrices(param: Param) -> list[Matrix]:
    """The matrices of a plain parameter that this rank has alone."""
    tensor = param.tensor
    rows, columns = matrix_shape(tensor.shape, param.flatten)
    count = 1 if param.flatten else math.prod(tensor.shape[:-2])
    matrices: list[Matrix] = []
    for sub in range(count):
        region = Region(0, 0, rows, columns, sub * rows * columns, columns)
        layout = own_layout([region] if region.numel else [])
        matrices.append(
            Matrix(param, (rows, columns), layout, "no process groups", sub)
        )
    return matrices


def checked(matrices: Sequence[Matrix]) -> Sequence[Matrix]:
    """The ``matrices``. Raises ValueError if the shards of one do not tile it, or if a split does not fit."""
    # Matrices of equal layout and shape need one check.
    for matrix in {(m.layout, m.shape): m for m in reversed(matrices)}.values():
        regions = [r for shard in matrix.layout.shards for r in shard if r.numel]
        problem = problem_with_tiling(regions, matrix.shape)
        if problem:
            raise ValueError(f"{matrix.described}: {problem} ({matrix.placement})")
    for matrix in matrices:
        if matrix.split.sizes:
            problem = matrix.split.problem_with(matrix.shape)
            if problem:
                raise ValueError(f"{matrix.described}: {problem}")
    return matrices


class Replacement(NamedTuple):
    """A parameter, the one that took its place, and whether this one inherits the momentum."""

    former: Param
    current: Param
    inherits: bool


def take_places(
    seen: Sequence[Param], params: Sequence[Param], indices: dict[Tensor, int]
) -> list[Replacement]:
    """Finds which of ``params`` replace those that were ``seen`` before. They take their places in ``indices``: parameter ->
    its index in the config's dicts, -1 for a later one. A parameter may leave, and come back.
    """
    replaced = _replaced(seen, params)
    for old, new, _ in replaced:
        # A parameter that left may have no index.
        if old.tensor in indices:
            indices[new.tensor] = indices.pop(old.tensor)
    for param in params:
        param.config_index = indices.setdefault(param.tensor, -1)
    return replaced


def _replaced(former: Sequence[Param], now: Sequence[Param]) -> list[Replacement]:
    """Each parameter that took another one's place. It inherits the momentum if the shape and the name are the
    same and nothing else in its group moved. Without names, the type, placement, dtype or device must differ as
    well: a framework has sharded the parameter. Otherwise it is another layer of equal shape, whose momentum
    starts at zero as in stock Muon.
    """
    stayed = {param.tensor for param in former} & {param.tensor for param in now}
    replaced: list[Replacement] = []
    for param_group in dict.fromkeys(param.param_group for param in now):
        before = [param for param in former if param.param_group == param_group]
        after = [param for param in now if param.param_group == param_group]
        moved = 0
        pairs: list[tuple[Param, Param]] = []
        for old, new in zip(before, after):
            if old.tensor is not new.tensor:
                moved += 1
                if old.tensor not in stayed and new.tensor not in stayed:
                    pairs.append((old, new))
        for old, new in pairs:
            inherits = len(pairs) == moved and _is_same(old, new)
            replaced.append(Replacement(old, new, inherits))
    return replaced


def _is_same(old: Param, new: Param) -> bool:
    """Whether a parameter is another form of the one whose place it took."""
    if old.tensor.shape != new.tensor.shape or old.name != new.name:
        return False
    if new.name:
        return True
    # Freezing a parameter does not make it another kind of tensor.
    return old.traits[1:] != new.traits[1:]


def inherit_momentum(replaced: Iterable[Replacement], states: States) -> list[str]:
    """Gives momentum to parameters that replace others. Returns those that get none. The momentum of a parameter
    that left the groups stays with that parameter, too.
    """
    restarted = []
    for old, new, inherits in replaced:
        if "momentum_buffer" in states.get(old.tensor, {}) and new.tensor not in states:
            if inherits:
                states[new.tensor] = dict(states[old.tensor])
            else:
                restarted.append(new.described)
    return restarted


def drop_misshapen_momentum(params: Sequence[Param], states: States) -> list[str]:
    """Deletes momentum of another shape. Returns the parameters that had it."""
    restarted = []
    for param in params:
        state = states.get(param.tensor, {})
        buffer = state.get("momentum_buffer")
        if buffer is not None and buffer.shape != param.tensor.shape:
            restarted.append(param.described)
            del state["momentum_buffer"]
    return restarted
