"""An optimizer's parameters on this rank and their local parts, the matrices in them, and who inherits the momentum of replaced
ones.
"""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .._muon_split import Split
from .process_groups import current_device, device_of_group, process_rank
from .regions import Layout, newton_schulz_flops, problem_with_tiling, Region, Shape


def is_sum(tensor: Tensor) -> bool:
    """Whether ranks hold contributions to a sum (Partial)."""
    if not isinstance(tensor, DTensor):
        return False
    return any(placement.is_partial() for placement in tensor.placements)


def takes_update(tensor: Any) -> bool:
    """Whether this rank's contribution to a sum is the one that takes its update: the first one."""
    where = tensor.device_mesh.get_coordinate() or ()
    placed = zip(where, tensor.placements, strict=True)
    return all(place == 0 for place, placement in placed if placement.is_partial())


def summed(tensor: Any) -> Any:
    """``tensor`` with the sum on each rank that has contributed to it. All ranks of its mesh make this call. The sum of
    floats is made in float64, so that the order of its terms hardly counts.
    """
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    whole = tensor.to(wide).redistribute(tensor.device_mesh, placements)
    return whole.to(tensor.dtype)


def local_part(tensor: Tensor) -> Tensor:
    """The storage behind ``tensor`` on this rank, to be read or written in place."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    # A functional collective's result is a wrapper until its first use waits for it.
    local = local.wait() if hasattr(local, "wait") else local
    return local.detach() if local.requires_grad else local


def fitting_part(
    param: Tensor, other: Any, dtype: torch.dtype | None = None
) -> Tensor | None:
    """This rank's part of ``other``, if that has the shape, placement and device of ``param``, and ``dtype`` unless it is
    None; None for everything else.
    """
    if not isinstance(other, Tensor) or placement_of(param) != placement_of(other):
        return None
    local, own = other, param
    if isinstance(param, DTensor) and isinstance(other, DTensor):
        local, own = other._local_tensor, param._local_tensor
    if other.shape != param.shape or local.shape != own.shape:
        return None
    if local.device != own.device or local.layout != torch.strided:
        return None
    if dtype is not None and local.dtype != dtype:
        return None
    return local_part(other)


def placement_of(tensor: Any) -> tuple | None:
    """The placements and the mesh of a DTensor; None for a plain tensor."""
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.device_mesh
    return None


class Traits(NamedTuple):
    """The properties from which the layout of a parameter is read, for a later comparison."""

    # Whether it is a Parameter that takes no gradients. That does not depend on ``grad``, which ranks may differ in.
    frozen: bool
    # The dtype of its gradients, and of its momentum; None for any.
    grad_dtype: torch.dtype | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    # Only a contiguous parameter can be flattened.
    is_contiguous: bool
    # Of a DTensor: the shape and device of its local tensor, its mesh and its placements.
    placed: tuple = ()

    @property
    def momentum_dtype(self) -> torch.dtype:
        return self.grad_dtype or self.dtype


def traits_of(param: Tensor) -> Traits:
    placed: tuple = ()
    if isinstance(param, DTensor):
        local = param._local_tensor
        placed = local.shape, local.device, param.device_mesh, param.placements
    # Only leaves have gradients. Functions that are called outside of a step also take other tensors.
    grad_dtype = param.grad_dtype if param.is_leaf else param.dtype
    return Traits(
        isinstance(param, torch.nn.Parameter) and not param.requires_grad,
        grad_dtype,
        param.shape,
        param.dtype,
        param.device,
        param.is_contiguous(),
        placed,
    )


def like_param(param: Tensor, local: Tensor) -> Tensor:
    """``local`` as a tensor of the kind and placement of ``param``, without communication."""
    if not isinstance(param, DTensor):
        return local
    # DTensor.from_local() would move an offloaded one to the mesh's device.
    meta = TensorMeta(param.shape, param.stride(), local.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, meta)
    return DTensor(local, spec, requires_grad=False)


def device_of(
    params: Sequence[Tensor], groups: Iterable[ProcessGroup] = ()
) -> torch.device:
    """The device of the communication buffers of the ranks that share ``params``, in ``groups`` of theirs."""
    of_meshes = {p.device_mesh.device_type for p in params if isinstance(p, DTensor)}
    if len(of_meshes) > 1:
        raise ValueError(
            f"the parameters are on meshes of different device types: {sorted(of_meshes)}; give each type its own Muon"
        )
    # The first accelerator, or else the first one.
    devices = [param.device for param in params] or [torch.device("cpu")]
    device = max(devices, key=lambda device: device.type not in ("cpu", "meta"))
    for device_type in of_meshes:
        if device.type != device_type:
            # Offloaded parameters are on the CPU, but their mesh communicates between accelerators.
            device = current_device(device_type)
    for group in groups:
        if device.type in ("cpu", "meta"):
            # A group of accelerators takes no tensors on the CPU.
            device = device_of_group(group)
    return device


States = MutableMapping[Tensor, MutableMapping[str, Any]]


@dataclass(eq=False)
class Param:
    """A parameter on this rank, as it was when the engine was built. ``formulas`` (a MuonFormulas) has the options of its
    parameter group, the ``param_group``-th one, at that time.
    """

    index: int
    tensor: Tensor
    name: str | None = None
    param_group: int = 0
    formulas: Any = None
    # The id of its expert, which the config may know.
    expert: int | None = None
    # Its index when the optimizer got it, which the config's dicts count by; -1 for a later one. By default, its ``index``.
    config_index: Any = None

    def __post_init__(self) -> None:
        if self.config_index is None:
            self.config_index = self.index
        # How it becomes matrices.
        self.split, self.flatten = Split(), False
        if self.formulas is not None:
            self.split, self.flatten = self.formulas.form
        # The properties that the layout is read from. Every step compares them.
        self.traits = traits_of(self.tensor)
        self.frozen = self.traits.frozen
        self.is_dtensor = isinstance(self.tensor, DTensor)
        # Whether ranks hold contributions to a sum.
        self.is_sum = is_sum(self.tensor)

    def part_of_momentum(self, buffer: Any, dtype: torch.dtype | None) -> Tensor | None:
        """This rank's part of a momentum ``buffer``, if a step can take it without a change; None for another one."""
        part = fitting_part(self.tensor, buffer, dtype)
        if part is not None and self.flatten and not part.is_contiguous():
            # A checkpoint may bring it in channels_last.
            return None
        return part

    @property
    def place_of_expert(self) -> int:
        """The place of its expert in the order of all ranks. Experts come last, by their ids."""
        return -1 if self.expert is None else self.expert

    @property
    def described(self) -> str:
        return describe(self, self.tensor.shape)


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
        matrices.append(Matrix(param, (rows, columns), layout, sub=sub))
    return matrices


def checked(matrices: Sequence[Matrix]) -> Sequence[Matrix]:
    """The ``matrices``. Raises ValueError if the shards of one do not tile it, or if a split does not fit."""
    # Matrices of equal layout and shape need one check.
    for matrix in {(m.layout, m.shape): m for m in reversed(matrices)}.values():
        regions = [*chain(*matrix.layout.shards)]
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
        moved: list[tuple[Param, Param]] = []
        for old, new in zip(before, after):
            if old.tensor is not new.tensor:
                moved.append((old, new))
        pairs = [pair for pair in moved if stayed.isdisjoint(p.tensor for p in pair)]
        for old, new in pairs:
            inherits = len(pairs) == len(moved) and _is_same(old, new)
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
    restarted: list[str] = []
    for old, new, inherits in replaced:
        if "momentum_buffer" in states.get(old.tensor, {}) and new.tensor not in states:
            if inherits:
                states[new.tensor] = dict(states[old.tensor])
            else:
                restarted.append(new.described)
    return restarted


def drop_misshapen_momentum(params: Sequence[Param], states: States) -> list[str]:
    """Deletes momentum of another shape. Returns the parameters that had it. Only for a new engine: between steps, FSDP and
    memory savers show other shapes for a while.
    """
    restarted: list[str] = []
    for param in params:
        state = states.get(param.tensor, {})
        buffer = state.get("momentum_buffer")
        if buffer is not None and buffer.shape != param.tensor.shape:
            restarted.append(param.described)
            del state["momentum_buffer"]
    return restarted
