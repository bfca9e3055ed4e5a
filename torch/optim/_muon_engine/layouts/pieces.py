"""This rank's pieces of matrices that process groups share: the facts, before any rank tells another one."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..process_groups import group_ranks, is_dry_run, listed, process_rank, Ranks
from .layout import Key, Layout, Regions, Shape, Shards
from .local import local_part, traits_of


# The order in which cuts are undone. FSDP cuts last, the shard that TP left. DDP and CP replicate.
KINDS = ("fsdp", "tp", "ddp", "cp")

KindGroups = Mapping[str, ProcessGroup]
_HASH_MASK = 2**31 - 1


class Cut(NamedTuple):
    """A process group over which a matrix is cut along ``dim``; None for replicas and for FSDP1's regions."""

    kind: str
    ranks: Ranks
    dim: int | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks hold different shards, and not replicas."""
        return self.kind == "fsdp" or self.dim is not None


Cuts = tuple[Cut, ...]


@dataclass(frozen=True)
class Piece(Layout):
    """What a rank knows of a matrix while the ranks read. The ranks of ``cuts`` know the rest."""

    cuts: Cuts = ()

    @classmethod
    def of(cls, layout: Layout, cuts: Cuts) -> "Piece":
        return cls(
            layout.key,
            layout.shape,
            layout.dtype,
            layout.shards,
            layout.placement,
            layout.frozen,
            cuts,
        )


def in_words(cuts: Cuts, with_ranks: bool = False) -> str:
    """How the process groups cut or replicate a matrix, for error messages."""
    if not cuts:
        return "no process groups"
    texts: list[str] = []
    for cut in cuts:
        text = cut.kind
        if cut.kind == "tp":
            text += f" along dimension {cut.dim}"
        if with_ranks:
            text += f" over ranks {listed(cut.ranks, 16)}"
        texts.append(text)
    return f"process groups: {', '.join(texts)}"


def hashed(values: tuple) -> int:
    """A positive hash of numbers, equal on all ranks."""
    return hash(values) & _HASH_MASK


class LocalPieces:
    """This rank's pieces of matrices, and how process groups share these. ``shared`` are the groups by kind, and
    ``ep_group`` is the expert-parallel one.
    """

    def __init__(self, shared: KindGroups, ep_group: ProcessGroup | None) -> None:
        # A unit of FSDP1 may have other groups than those that were given.
        self.group_of = {(kind, group_ranks(g)): g for kind, g in shared.items()}
        self.ep_ranks = (process_rank(),) if ep_group is None else group_ranks(ep_group)
        # Those of the DTensors' meshes, whose ranks must hear of an error, too.
        self.mesh_groups: list[ProcessGroup] = []
        # Why this rank could not collect them.
        self.error: Exception | None = None
        self.layouts: list[Piece] = []
        # Index -> the expert's id, also of a stack of which this rank has no matrix.
        self.expert_of: dict[int, int | None] = {}
        # Digests of the values that this rank stores of cut matrices; 0 for zeros.
        self.digests: dict[Key, int] = {}
        # Text -> the matrices that it is about.
        self.warnings: defaultdict[str, list[str]] = defaultdict(list)

    def cuts_of(self, groups: KindGroups, dims: Mapping[str, int | None]) -> Cuts:
        """How ``groups``, by kind, share a matrix. Those with a dimension in ``dims`` cut it."""
        cuts: list[Cut] = []
        for kind in KINDS:
            group = groups.get(kind)
            if group is not None and group.size() > 1:
                cut = Cut(kind, group_ranks(group), dims.get(kind))
                self.group_of[kind, cut.ranks] = group
                cuts.append(cut)
        return tuple(cuts)

    def add_piece(
        self, key: Key, param: Tensor, shape: Shape, regions: Regions, cuts: Cuts
    ) -> None:
        """Adds a matrix of which this rank has a piece of ``shape``, and stores ``regions`` of the piece."""
        traits = traits_of(param)
        piece = Piece(
            key,
            shape,
            traits.grad_dtype or traits.dtype,
            Shards((process_rank(),), (regions,)),
            placement=in_words(cuts),
            frozen=traits.frozen,
            cuts=cuts,
        )
        self.layouts.append(piece)
        has_values = not param.is_meta and not is_dry_run()
        # Replicas along TP may be shards that the user forgot.
        if has_values and any(cut.is_sharded or cut.kind == "tp" for cut in cuts):
            local = local_part(param)
            total = 0.0
            for region in regions:
                values = region.of_local(local).abs()
                total += values.sum(dtype=torch.float64).item()
            # The low bits of a number's own hash lack most of its fraction.
            self.digests[key] = hashed((total,)) if total else 0
