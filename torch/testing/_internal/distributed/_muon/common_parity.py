"""The rows and columns of the table of parity: how ranks share matrices, and the options of Muon."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from typing import Any, NamedTuple, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_config import (
    NewtonSchulzCalls,
    parts_of,
)
from torch.testing._internal.distributed._muon.common_muon import (
    as_on_an_accelerator,
    Cut,
    device,
    everyone,
    grid_of,
    local,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


P = Partial()
WORLDS = (1, 2, 4, 8)


def grid(dims):
    """A mesh of all ranks, a power of two, as square as it can be."""
    sizes = [1] * dims
    for number in range(dist.get_world_size().bit_length() - 1):
        sizes[number % dims] *= 2
    return grid_of(*sizes)


class Placed(NamedTuple):
    """Matrices, the ranks that hold each of them, and what makes a config of the two flags.

    Ranks that share a matrix have the same of ``seeds`` for it.
    """

    matrices: list[Spec | Cut]
    holders: list[list[int]]
    make_config: Callable[..., Any]
    seeds: Sequence[int] | None = None


Shapes = list[tuple[int, ...]]


def ranks_of(mesh):
    return mesh.mesh.flatten().tolist()


def on(dims, *placements, **options):
    """DTensors on a mesh of ``dims`` dimensions with all ranks."""
    return lambda shapes: on_mesh(grid(dims), placements, shapes, **options)


def on_mesh(mesh, placements, shapes, gradients=None):
    matrices = []
    for shape in shapes:
        matrices.append(Spec(shape, mesh, placements, gradients=gradients))
    return Placed(matrices, [ranks_of(mesh)] * len(shapes), create_dtensor_config)


def descending(shapes):
    return on_mesh(DeviceMesh(device().type, ranks_of(grid(1))[::-1]), (S0,), shapes)


def strided(shapes):
    """FSDP2 over TP."""
    outer = _StridedShard(0, split_factor=grid(2).size(1))
    return on_mesh(grid(2), (outer, S0), shapes)


def several_meshes(shapes):
    """One matrix after another on several meshes, two with the same group; and one that each rank has for itself."""
    ranks = ranks_of(grid(1))
    meshes = [
        (grid(2), (S1, S0)),
        (grid(1), (R,)),
        (DeviceMesh("cpu", ranks, mesh_dim_names=("other",)), (R,)),
        (grid(2)["a"], (S0,)),
        (DeviceMesh("cpu", ranks[::-1]), (S1,)),
        (grid(2)["b"], (R,)),
    ]
    matrices = [Spec(shapes[0], None, None)]
    holders = [[dist.get_rank()]]
    for number, (mesh, placements) in enumerate(meshes):
        matrices.append(Spec(shapes[number % len(shapes)], mesh, placements))
        holders.append(ranks_of(mesh))
    return Placed(matrices, holders, create_dtensor_config)


def cut(*kinds, how="chunk", tp_dims=(0, 1, None, -1, -2)):
    """Pieces that are cut by hand along the groups of one mesh."""

    def place(shapes):
        strategy, options = Strategy(grid(len(kinds)), *kinds), {}
        matrices, cut_dims = [], {}
        for index, shape in enumerate(shapes):
            dim = tp_dims[index % len(tp_dims)] if "tp" in kinds else None
            matrices.append(strategy.cut(shape, dim, how))
            if dim is not None:
                cut_dims[index] = dim
        if "tp" in kinds:
            options["tp_dim_per_param"] = cut_dims
        holders = [ranks_of(strategy.mesh)] * len(shapes)
        return Placed(matrices, holders, functools.partial(strategy.config, **options))

    return place


def cut_in_rows(kind, divided, make_options):
    """Ranks of a row of the mesh share matrices over a group of ``kind``. The rows have other ones."""

    def place(shapes):
        row, mesh = grid(2).get_local_rank("a"), grid(2)["b"]
        strategy = Strategy(mesh, kind)
        options = {f"{divided}_process_group": grid(2).get_group("a")}
        options |= make_options(row, len(shapes))
        matrices = [strategy.cut(shape) for shape in shapes]
        make_config = functools.partial(strategy.config, **options)
        seeds = range(100 * row, 100 * row + len(shapes))
        holders = [ranks_of(mesh)] * len(shapes)
        return Placed(matrices, holders, make_config, seeds)

    return place


def cut_and_dtensors(shapes):
    """Pieces that are cut by hand, and DTensors over the same ranks."""
    by_hand = cut("fsdp", "tp", tp_dims=(1,))(shapes)
    dtensors = on(2, S0, S1)(shapes)
    matrices = by_hand.matrices + dtensors.matrices
    return by_hand._replace(
        matrices=matrices, holders=by_hand.holders + dtensors.holders
    )


def replicas_by_group(shapes):
    """DTensors on a part of the mesh, which a group of the config replicates."""
    matrices = [Spec(shape, grid(2)["b"], (S0,)) for shape in shapes]
    make_config = Strategy(grid(2)["a"], "ddp").config
    return Placed(matrices, [ranks_of(grid(2))] * len(shapes), make_config)


LAYOUTS = {
    "rows": on(1, S0),
    "columns": on(1, S1),
    "replicas": on(1, R),
    "replicas_with_summed_gradients": on(1, R, gradients=(P,)),
    "descending_ranks": descending,
    "part_of_the_mesh": lambda shapes: on_mesh(grid(2)["a"], (S0,), shapes),
    "rows_and_columns": on(2, S0, S1),
    "hsdp": on(2, R, S0),
    "fsdp2_over_tp": strided,
    "strided_rows": on(1, _StridedShard(0, split_factor=2)),
    "sums": on(1, P),
    "sums_of_rows": on(2, P, S0),
    "columns_of_sums": on(2, S1, P),
    "three_dimensions": on(3, R, S0, S1),
    "four_dimensions": on(4, S1, S0, R, S1),
    "each_kind_of_placement": on(3, P, S0, R),
    "several_meshes": several_meshes,
    "fsdp": cut("fsdp"),
    "fsdp_on_the_last_rank": cut("fsdp", how="last"),
    "tp": cut("tp"),
    "ddp": cut("ddp"),
    "cp": cut("cp"),
    "fsdp_tp": cut("fsdp", "tp", how="balanced"),
    "ddp_fsdp": cut("ddp", "fsdp"),
    "tp_cp": cut("tp", "cp", how="last"),
    "fsdp_and_dtensors": cut_and_dtensors,
    "ddp_of_dtensors": replicas_by_group,
    "experts": cut_in_rows("fsdp", "ep", lambda row, count: {"expert_assignments": dict.fromkeys(range(count), row)}),
    "stages": cut_in_rows("ddp", "pp", lambda row, _: {"pp_stage_id": row}),
}  # fmt: skip


# The shapes of what is no single matrix, and the options of its parameter group.
FORMS = [
    ([(8, 8), (7, 5), (3, 9), (16, 4), (1, 8)], {}),
    ([(12, 8), (12, 5)], {"split": (7, 5)}),
    ([(12, 8), (12, 3)], {"split": {"sizes": (2, 1), "repeats": 4}}),
    ([(8, 6), (3, 6)], {"split": {"sizes": (2, 4), "dim": 1}}),
    ([(9, 4, 3), (2, 3, 5)], {"flatten": True}),
    ([(5, 6, 4), (2, 9, 4)], {}),
]
DTYPES = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float64},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "grad_dtype": torch.float32},
]
ALGORITHMS = ["quintic", "gram", "symmetric"]
RULES = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw"},
    {"momentum": 0.3, "weight_decay": 0.0},
]
LOOPS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]  # fmt: skip
FLAGS = [(True, 1), (False, 1), (True, 0), (False, 0), (True, 2), (False, 2)]
# The learning rate of a second parameter group, which has half of the parameters.
SECOND_GROUP = [None, 0.3]
# Which of the parameters have no gradient in the second step.
MISSING = [slice(0), slice(0, 1), slice(1, None), slice(None)]
OWNERS = ["chosen by Muon", "chosen by the user"]
# After the first step, or in the third one.
PLACES = ["a CPU", "as on an accelerator", "under autocast"]


class Cell(NamedTuple):
    """The names are those of the columns."""

    world: int = 4
    form: tuple[Shapes, dict[str, Any]] = FORMS[0]
    flags: tuple[bool, int] = FLAGS[0]
    dtype: dict[str, Any] = DTYPES[0]
    rule: dict[str, Any] = RULES[0]
    loop: dict[str, Any] = LOOPS[0]
    missing: slice = MISSING[0]
    algorithm: str = ALGORITHMS[0]
    second_group: float | None = None
    owners: str = OWNERS[0]
    place: str = PLACES[0]


COLUMNS = Cell(WORLDS, FORMS, FLAGS, DTYPES, RULES, LOOPS, MISSING, ALGORITHMS, SECOND_GROUP, OWNERS, PLACES)  # fmt: skip
CELLS_OF_A_LAYOUT = 6


def cells_of(layout):
    """A layout has each option in one of its cells. Any two options are together in a cell of some layout."""
    generator = random.Random(f"0 {layout}")
    columns = []
    for options in COLUMNS:
        repeated = list(options)
        while len(repeated) < CELLS_OF_A_LAYOUT:
            repeated.append(generator.choice(options))
        generator.shuffle(repeated)
        columns.append(repeated)
    return [Cell(*chosen) for chosen in zip(*columns, strict=True)]


def make_twins(layout, cell):
    shapes, form = cell.form
    options: dict[str, Any] = {"lr": 0.1, **cell.rule, **cell.loop}
    is_stack = len(shapes[0]) > 2 and not form
    placed = LAYOUTS[layout](shapes)
    dtype = cell.dtype["dtype"]
    matrices = [matrix._replace(dtype=dtype) for matrix in placed.matrices]
    config = placed.make_config(
        async_gpu_parallelism=cell.flags[0], prefetch_count=cell.flags[1]
    )
    # Some of a stack's matrices may be with one rank only.
    if cell.owners == "chosen by the user" and not is_stack:
        config = dataclasses.replace(config, assign_fn=assigning(placed.holders))
    every = range(len(matrices))
    groups = [(every, form)]
    half = max(1, len(matrices) // 2)
    if cell.second_group is not None and half < len(matrices):
        second = {**form, "lr": cell.second_group}
        groups = [(every[:half], form), (every[half:], second)]
    twins = Twins(
        matrices,
        config,
        groups,
        seeds=placed.seeds,
        grad_dtype=cell.dtype.get("grad_dtype"),
        ns_algorithm=cell.algorithm,
        allow_batched_matrices=is_stack,
        **options,
    )
    return twins, placed


def assigning(holders):
    def assign(params, state):
        owners: dict[int, list[int]] = {}
        for index, ranks in enumerate(holders):
            owners.setdefault(ranks[(3 * index + 1) % len(ranks)], []).append(index)
        return owners

    return assign


def check_cell(case, layout, cell):
    """Three steps have the bits of one process. The third one computes nothing twice, and sends the least."""
    with case.subTest(layout=layout, **cell._asdict()):
        twins, placed = make_twins(layout, cell)
        # It takes batches apart, which are rounded otherwise.
        with NewtonSchulzCalls():
            twins.step()
        case.assertParity(twins, "step 1")
        if cell.place == "as on an accelerator":
            as_on_an_accelerator(twins.optimizer)
        with NewtonSchulzCalls():
            twins.step(range(len(twins.params))[cell.missing])
        case.assertParity(twins, "step 2")
        twins.set_gradients()
        with NewtonSchulzCalls():
            twins.single.step()
        is_autocast = cell.place == "under autocast"
        autocast = torch.autocast("cpu", torch.float16, enabled=is_autocast)
        with NewtonSchulzCalls() as calls, case.recorder() as seen, autocast:
            twins.optimizer.step()
        case.assertParity(twins, "step 3")
        check_computed_once(case, twins, placed, len(calls.shapes))
        is_one_matrix = not cell.form[1] and len(cell.form[0][0]) == 2
        is_summed = any(spec.is_summed for spec in twins.specs)
        if isinstance(seen, Recorder) and is_one_matrix and not is_summed:
            case.assertEverywhere(too_much(twins, seen), "bytes")


def check_computed_once(case, twins, placed, calls):
    (form, *_) = twins.single.param_groups
    own_share = 0.0
    for single, ranks in zip(twins.singles, placed.holders, strict=True):
        parts = parts_of(single.detach(), form["split"], form["flatten"])
        own_share += len(parts) / len(ranks)
    shares_and_calls = everyone((own_share, calls))
    expected = round(sum(share for share, _ in shares_and_calls))
    case.assertEqual(sum(count for _, count in shares_and_calls), expected)


def too_much(twins, seen):
    """Whether this rank receives more than what it lacks of its own matrices, and its pieces of the other ones."""
    rank = dist.get_rank()
    own = twins.optimizer.assignments.get(rank, [])
    expected = 0
    for index, param in enumerate(twins.params):
        count = local(param).numel()
        expected += 2 * (
            math.prod(twins.specs[index].shape) - count if index in own else count
        )
    received = 0
    for call in seen.calls:
        if call.splits:
            of_ranks = dict(zip(call.comm.ranks, call.splits[1]))
            of_ranks.pop(rank)
            received += call.itemsize * sum(of_ranks.values())
        elif call.name == "broadcast" and call.source != rank:
            received += call.nbytes
    return [] if received == expected else [f"{received} instead of {expected}"]
