# %% [markdown]
"""# The blueprint: distributed Muon over DP x TP, on eight CPU processes

Muon turns the whole momentum matrix of each weight into a nearly orthogonal one. But
in a large training no process has a whole matrix. Data parallelism (DP, of the kind
that shards) and tensor parallelism (TP) leave each with a piece, its *shard*. So the
shards have to meet.

Jen Wei's [CPU-friendly tutorial][wei], the "blueprint", walks one way there:

    DP gather -> TP gather -> orthogonalize -> TP shard -> DP shard

This is an answer to it, on the Muon of this repository. We walk the blueprint's way
too, step by step. Then we watch a shorter one: every matrix has one owner. The shards
go to the owner and nowhere else, and it orthogonalizes the matrix once for all.

As a script, this starts eight processes by itself, and ends with a proof. The exit
code is 1 if the proof fails:

    python examples/blueprint.py
    python examples/blueprint.py --grid 2x4

As a notebook, `blueprint.ipynb`, it is the same text and the same code. That is made
from this by `jupytext --to ipynb --update examples/blueprint.py`. Its two raw cells are
for the script alone.

It takes ten minutes if you read the text and what is printed, and skip most code. At a
first reading, the docstrings are enough in these cells: the model (chapter 2), the master
schedule (5), `report_of` (6), `ways` (7) and `problems_in` (9).

[wei]: https://huggingface.co/datasets/bird-of-paradise/muon-distributed
"""

# %% tags=["active-ipynb"]
# # A hosted notebook has neither this repository nor its torch: this brings both.
# import importlib
# import os
# import subprocess
# import sys
# from importlib.util import find_spec
# from pathlib import Path
#
# REPOSITORY = os.environ.get("MUON_REPOSITORY", "")  # or write its address here
# clone = Path.cwd() / "distributed-muon"
# places = [Path.cwd(), Path.cwd() / "examples", clone / "examples"]
#
#
# def do(*command):
#     done = subprocess.run(command, capture_output=True, text=True)
#     print(done.stdout + done.stderr)
#     done.check_returncode()
#
#
# def has_overlay():
#     # An import would keep the torch that is there before.
#     torch = find_spec("torch")
#     return bool(torch) and (Path(torch.origin).parent / "optim" / "muon.py").exists()
#
#
# if not any((place / "blueprint.py").exists() for place in places):
#     if not REPOSITORY:
#         raise RuntimeError("Write this repository's address into REPOSITORY.")
#     do("git", "clone", "--depth", "1", REPOSITORY, str(clone))
# if clone.exists() and not has_overlay():
#     do(sys.executable, "-m", "pip", "install", "torch==2.13.0")
#     overlay = str(clone / "setup_overlay.py")
#     do(sys.executable, overlay, "apply", "--python", sys.executable)
#     importlib.invalidate_caches()

# %% tags=["active-ipynb"]
# # So that the notebook finds the files beside it, and a torch that has this Muon.
# here = [place for place in places if (place / "blueprint.py").exists()]
# sys.path.insert(0, str(here[0]))
# try:
#     import torch.optim.muon
# except ImportError as error:
#     raise ImportError(
#         f"{error}. This kernel needs the overlay: `python3 setup_overlay.py env`, then "
#         "`.venv/bin/python -m pip install jupyterlab`, and start the notebook by "
#         "`.venv/bin/python -m jupyterlab examples/blueprint.ipynb`."
#     ) from error

# %% tags=["active-py"]
import sys

from processes import leave_on_signals


if __name__ == "__main__":
    leave_on_signals()
    try:
        import torch.optim.muon
    except ImportError as error:
        print(
            f"blueprint: {error}; this needs the overlay: `python3 setup_overlay.py env`, "
            "then `.venv/bin/python examples/blueprint.py`.",
            file=sys.stderr,
        )
        sys.exit(2)

# %%
import hashlib
import math
from functools import partial
from typing import Any, NamedTuple

import blueprint_tables as tables
import torch
import torch.distributed as dist
from blueprint_long_way import LongWay
from blueprint_processes import (
    first_difference,
    gradient,
    matrices_of,
    overheard,
    run,
    take_step,
    values_of,
)
from measure import Meter
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.optim import Muon
from torch.optim._muon_engine.layouts import Key, Layout
from torch.optim._muon_engine.layouts.dtensor import DTensorLayouts
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners
from torch.optim._muon_engine.schedule.packs import Bucket, Schedule
from torch.optim._newton_schulz import NS_DTYPE
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.distributed.fake_pg import FakeStore


# %% [markdown]
# ## 1. The grid
#
# Eight processes stand in a grid. A process goes by its number, its *rank*.
#
# - The ranks of a column are a DP group. They see different data, and each stores some
#   of the rows of what they have in common.
# - The ranks of a row are a TP group. They see the same data, and each does a part of
#   each layer's work.
#
# Every rank is in one group of each kind. On a cluster, a TP group is inside one
# machine, where links are fast. A DP group reaches across machines.


# %%
class Grid(NamedTuple):
    """``dp`` rows of ``tp`` ranks."""

    dp: int
    tp: int

    @property
    def ranks(self) -> range:
        return range(self.dp * self.tp)

    def place(self, rank: int) -> tuple[int, int]:
        """Row and column of ``rank``: its numbers in its DP group and its TP group."""
        return divmod(rank, self.tp)

    def dp_group(self, rank: int) -> list[int]:
        return [r for r in self.ranks if self.place(r)[1] == self.place(rank)[1]]

    def tp_group(self, rank: int) -> list[int]:
        return [r for r in self.ranks if self.place(r)[0] == self.place(rank)[0]]


GRID = Grid(4, 2)

# %% tags=["active-ipynb"]
# tables.print_grid(GRID)

# %% [markdown]
# ## 2. What a rank holds
#
# Our model is the matrices of six small transformer blocks: four in each, 24 in all.
# PyTorch cuts each matrix twice:
#
# - TP cuts first. Of `qkv` and `up` each rank gets some rows (PyTorch calls the layer
#   *column-parallel*), of `out` and `down` some columns (*row-parallel*).
# - FSDP2 (`fully_shard`) then cuts the rows of what TP has left.
#
# Momentum is cut just as its weight is.
#
# In DTensor's words these are *placements*, one for each dimension of the grid: `S(0)`
# is a cut by rows, `S(1)` one by columns. `_S(0, 2)` is a cut of rows that another
# dimension has cut in two before.
#
# The engine does not interpret them. Its *reader* asks DTensor which rectangles of each
# matrix each rank holds, its *regions*. The answer is called a *layout*.
#
# Up to chapter 5 all is arithmetic, and needs no process but this one. A process group
# that only pretends stands in for the other ranks.

# %%
WIDTH, BLOCKS = 32, 6
# Two parameter groups, each with a learning rate of its own: the blueprint's "aisles".
AISLES = {"attention": (("qkv", "out"), 0.02), "mlp": (("up", "down"), 0.01)}
TP_PLAN = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
# The dimension of the weight that TP cuts.
TP_DIM = {"qkv": 0, "out": 1, "up": 0, "down": 1}


class Block(nn.Module):
    """The matrices of a transformer block. Nobody computes a loss here."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)


def build(mesh: DeviceMesh | None) -> nn.ModuleList:
    """The model, equal on every rank; cut by TP and FSDP2 where there is a ``mesh``."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    for block in blocks if mesh is not None else ():
        parallelize_module(block, mesh["tp"], TP_PLAN)
        fully_shard(block, mesh=mesh["dp"])
    return blocks


def aisles_of(blocks: nn.ModuleList) -> list[dict[str, Any]]:
    """The parameter groups, as an optimizer takes them: names and parameters."""
    return [
        {
            "params": [
                (f"{i}.{kind}", getattr(block, kind).weight)
                for i, block in enumerate(blocks)
                for kind in kinds
            ],
            "lr": lr,
        }
        for kinds, lr in AISLES.values()
    ]


def layouts_of(grid: Grid) -> list[Layout]:
    """Where the shards of each matrix are, in the optimizer's order."""
    world = len(grid.ranks)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        named = [pair for aisle in aisles_of(build(mesh)) for pair in aisle["params"]]
        reader = DTensorLayouts()
        return [
            layout
            for i, (name, param) in enumerate(named)
            for layout in reader.of(Key(i, 0, name), param)
        ]
    finally:
        dist.destroy_process_group()


# %% tags=["active-ipynb"]
# layouts = layouts_of(GRID)
# tables.print_shards(layouts)

# %% [markdown]
# ## 3. Who owns what
#
# Each matrix gets one *owner*. Only the owner orthogonalizes it. Any rank of the grid
# can be one, wherever it stands.
#
# The matrix with the most work is given away first, each to the rank that has the
# least work so far. Work is counted in floating-point operations (FLOPs) of
# Newton-Schulz, the iteration that orthogonalizes. Every rank computes this for itself,
# and all come to the same answer.

# %% tags=["active-ipynb"]
# owners = assign_owners(layouts)
# tables.print_owners(layouts, owners)

# %% [markdown]
# ## 4. The schedule
#
# The matrices do not travel one by one, and not all at once, but in *buckets*. In a
# bucket, each owner has about the same work. A bucket has two collectives, each of them
# one `all_to_all_single` over all ranks:
#
# - the *gather*: every rank sends each owner its shards, rounded to bfloat16;
# - the *scatter*: every owner sends each rank its regions of the results.
#
# The schedule follows from layouts and owners alone. It is made once, before the first
# step.
#
# What is the least that has to be sent? An owner lacks what it does not hold itself.
# Each other rank lacks its part of the result. The schedule sends just that.


# %%
def sent_by(schedule: Schedule, bucket: Bucket, rank: int) -> dict[str, list[int]]:
    """Bytes that ``rank`` sends each of the ranks in the two collectives of a bucket."""
    packs = schedule.packs(bucket, rank)
    sent = {"gather": packs.gather_send, "scatter": packs.scatter_send}
    width = NS_DTYPE.itemsize
    return {what: [n * width for n in pack.splits] for what, pack in sent.items()}


def lower_bound(schedule: Schedule, rank: int) -> int:
    """Bytes that ``rank`` has to send: its shards to owners; as an owner, the rest."""
    elements = 0
    for layout, owner in zip(schedule.layouts, schedule.owners):
        own = sum(region.numel for region in layout.shards.of(rank))
        elements += layout.numel - own if owner == rank else own
    return elements * NS_DTYPE.itemsize


def digest(schedule: Schedule) -> str:
    """A fingerprint, by which the eight processes compare their schedules."""
    return hashlib.sha256(repr(schedule).encode()).hexdigest()[:12]


# %% tags=["active-ipynb"]
# schedule = make_schedule(layouts, owners, NS_DTYPE)
# tables.print_buckets(schedule)
# tables.print_bytes(schedule, sent_by, lower_bound)

# %% [markdown]
# ## 5. The long way
#
# Now the blueprint's own route, with plain collectives. It belongs to ZeRO-1: the state
# of the optimizer is cut over DP, but not matrix by matrix.
#
# - A rank's TP slices are laid end to end in a *virtual buffer*. It is virtual because
#   no rank stores all of it. Each parameter group has one (an *aisle*, `buffer_idx`).
# - The buffer is filled into *buckets* (*pallets*, `bucket_idx`). Each bucket is cut
#   into equal runs, one for each member of the DP group. A rank stores its run.
# - The *master schedule* (`dist_meta`) says where each matrix is. Here it is a list of
#   entries.
#
# A run does not care where a matrix ends. It may begin in the middle of one.
#
# The route is the blueprint's. Momentum, learning rate and the rest are those of the
# Muon here, so that we can compare.


# %%
class Entry(NamedTuple):
    """One line of the master schedule: where a matrix's TP slice stands."""

    name: str
    aisle: int
    bucket: int
    start: int  # first element within the bucket
    shape: tuple[int, int]  # of the TP slice
    tp_dim: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


BUCKET = 12288  # elements, unless one slice alone has more


def master_plan(layouts: list[Layout], grid: Grid) -> list[Entry]:
    entries: list[Entry] = []
    for layout in layouts:
        kind = layout.key.name.split(".")[1]
        aisle = [kind in kinds for kinds, _ in AISLES.values()].index(True)
        shape = list(layout.shape)
        shape[TP_DIM[kind]] //= grid.tp
        bucket = start = 0
        if entries and entries[-1].aisle == aisle:
            bucket, start = entries[-1].bucket, entries[-1].stop
        if start and start + math.prod(shape) > BUCKET:
            bucket, start = bucket + 1, 0
        entries.append(
            Entry(layout.key.name, aisle, bucket, start, tuple(shape), TP_DIM[kind])
        )
    return entries


def bucket_sizes(entries: list[Entry], grid: Grid) -> dict[tuple[int, int], int]:
    """The elements of each bucket, filled up to a multiple of the DP group's size."""
    filled = {(entry.aisle, entry.bucket): entry.stop for entry in entries}
    return {key: -(-stop // grid.dp) * grid.dp for key, stop in filled.items()}


def run_of(entry: Entry, row: int, buckets: dict, grid: Grid) -> tuple[int, int]:
    """From where to where the DP group's member ``row`` stores the slice, flattened."""
    length = buckets[entry.aisle, entry.bucket] // grid.dp
    first = max(entry.start, row * length) - entry.start
    last = min(entry.stop, (row + 1) * length) - entry.start
    return (first, last) if first < last else (0, 0)


# %% tags=["active-ipynb"]
# entries = master_plan(layouts, GRID)
# buckets = bucket_sizes(entries, GRID)
# stored = partial(run_of, buckets=buckets, grid=GRID)
# tables.print_virtual_buffer(entries, buckets, list(AISLES), GRID.dp, stored)

# %% [markdown]
# This is the journey. Steps 1 and 2 communicate, steps 4 and 5 only slice:
#
# 1. **DP gather.** `all_gather` each bucket over the DP group. Now each rank has all of
#    its TP slices.
# 2. **TP gather.** `all_gather` a slice over the TP group. Now each rank of the TP
#    group has the whole matrix.
# 3. **Run the math.** Each of them orthogonalizes it.
# 4. **TP shard.** Keep the TP slice, drop the rest.
# 5. **DP shard.** Keep the run, drop the rest.
#
# A rank takes steps 2 to 5 for the matrices of which it stores a part.
#
# Why is the DP gather bucketed, but not the TP gather? Each call has a fixed cost, its
# latency. Between machines that is high, so many small ones share one call. Inside a
# machine it is low. And one by one, only one whole matrix is in memory at a time.
#
# In short, with the numbers of the steps; all of it is `LongWay`, in
# `blueprint_long_way.py`:
#
#     dist.all_gather(runs, run, group=dp_group)          # 1, of a bucket
#     tp_slice = torch.cat(runs)[start:stop].view(shape)
#     dist.all_gather(slices, tp_slice, group=tp_group)   # 2
#     matrix = torch.cat(slices, dim=tp_dim)
#     update = newton_schulz(matrix)                      # 3
#     update_slice = update.chunk(tp, dim=tp_dim)[column] # 4
#     update_run = update_slice.flatten()[first:last]     # 5

# %% [markdown]
# ## 6. Eight processes
#
# Now for real. In each process, a job takes three steps with the same gradients, four
# times over: alone, with the whole matrices; with the engine, at two settings; and by
# the long way. What comes out alone has to come out each time, bit for bit.
#
# `overheard` listens at the engine's doors: it wraps some of its functions from
# outside, and notes when they are called. `Meter` counts Newton-Schulz calls and bytes.
#
# Each process has one thread. What waits does not wait forever.

# %%
STEPS = 3
AHEAD = (0, 1)  # values of prefetch_count


def report_of(mesh: DeviceMesh) -> dict[str, Any]:
    """What one rank has to tell."""
    grid = Grid(*mesh.shape)
    row, column = mesh.get_coordinate()

    def shard(name: str, matrix: Tensor) -> Tensor:
        """Cuts as FSDP2 does: TP shard, then some rows of that."""
        tp_slice = matrix.chunk(grid.tp, dim=TP_DIM[name.split(".")[1]])[column]
        return tp_slice.chunk(grid.dp, dim=0)[row].contiguous()

    alone = Muon(aisles_of(build(None)))
    start = {name: p.detach().clone() for name, p in matrices_of(alone).items()}
    for step in range(STEPS):
        take_step(alone, step, lambda name, matrix: matrix)
    whole = values_of(alone)
    expected = {n: tuple(shard(n, t) for t in pair) for n, pair in whole.items()}

    engines, differs = {}, {}
    for ahead in AHEAD:
        config = create_dtensor_config(prefetch_count=ahead)
        muon = Muon(aisles_of(build(mesh)), distributed_config=config)
        meter = Meter(muon)
        for step in range(STEPS):
            events: list[tables.Event] = []
            with overheard(events):
                take_step(muon, step, shard)
        engines[ahead] = {
            "owned": muon.assignments[dist.get_rank()],
            "schedule": digest(muon._engine.schedule),
            "calls": meter.newton_schulz / STEPS,
            "sent": sum(meter.wire.bytes.values()) / STEPS,
            "other": dict(meter.wire.other),
            "events": events,
        }
        way = f"engine, prefetch_count={ahead}"
        differs[way] = first_difference(values_of(muon), expected)

    entries = master_plan(list(muon._engine.schedule.layouts), grid)
    buckets = bucket_sizes(entries, grid)
    stores = partial(run_of, buckets=buckets, grid=grid)
    long = LongWay(
        start, entries, buckets, stores, [lr for _, lr in AISLES.values()], mesh
    )
    for step in range(STEPS):
        grads = {name: gradient(name, p.shape, step) for name, p in start.items()}
        long.step(grads, alone.defaults)
    runs = {s.name: tuple(long.shard(t, s) for t in whole[s.name]) for s in entries}
    stored = {name: (p, long.momentum[name]) for name, p in long.params.items()}
    differs["the long way"] = first_difference(stored, runs)
    return {
        "groups": [
            dist.get_process_group_ranks(group)
            for group in (long.dp_group, long.tp_group)
        ],
        "engine": engines,
        "long calls": {what: count / STEPS for what, count in long.calls.items()},
        "long sent": long.sent.total() / STEPS,
        "journey": long.journey,
        "differs": differs,
    }


# %% [markdown]
# In a notebook there is a catch. A spawned process is a fresh Python. It imports the
# function that it is to run, and it cannot import one from a notebook. So the job comes
# from the file, `blueprint.py`. What you change in the cell above has no effect on it.

# %% tags=["active-ipynb"]
# import blueprint
#
# reports = run(blueprint.report_of, *GRID)

# %% [markdown]
# ## 7. The long way, counted
#
# First the sizes of rank 0's first matrix on its journey. Then what each way costs. The
# engine's bytes are metered as it sends them. Those of the long way are counted: what
# each of its calls has to send, by the sizes of its tensors.
#
# A third way is not run at all: the long way, if DP cut each matrix by rows, as
# FSDP2 does. Every rank would have a part of every matrix, and orthogonalize them all.
#
# What comes after the optimizer is in none of them. ZeRO-1 has to gather the changed
# weights, and so has FSDP2, before the next forward pass.


# %%
def ways(
    reports: list[dict[str, Any]], schedule: Schedule, entries: list[Entry], grid: Grid
) -> list[tables.Way]:
    engine = [report["engine"][AHEAD[-1]] for report in reports]
    long = [report["long calls"] for report in reports]
    elements = sum(math.prod(entry.shape) for entry in entries)
    by_rows = elements // grid.dp * (grid.dp - 1) + elements * (grid.tp - 1)
    return [
        tables.Way(
            "the engine",
            [rank["calls"] for rank in engine],
            sum(rank["sent"] for rank in engine),
            2 * len(schedule.buckets),
        ),
        tables.Way(
            "the long way",
            [rank["Newton-Schulz"] for rank in long],
            sum(report["long sent"] for report in reports),
            max(rank["DP gather"] + rank["TP gather"] for rank in long),
        ),
        tables.Way(
            "the long way, cut by rows",
            [len(entries)] * len(reports),
            len(reports) * by_rows * torch.bfloat16.itemsize,
            len(bucket_sizes(entries, grid)) + len(entries),
        ),
    ]


def print_ways(
    reports: list[dict[str, Any]], schedule: Schedule, entries: list[Entry], grid: Grid
) -> None:
    least = sum(lower_bound(schedule, rank) for rank in grid.ranks)
    tables.print_ways(
        reports[0]["journey"], ways(reports, schedule, entries, grid), least
    )


# %% tags=["active-ipynb"]
# print_ways(reports, schedule, entries, GRID)

# %% [markdown]
# ## 8. The engine's step, as it happened
#
# `prefetch_count` says how many later gathers are on their way while a bucket is
# orthogonalized. With 0, the next gather starts only when a bucket's results are on
# their way. With 1, bucket 1 travels while bucket 0 is computed. In brackets is what is
# on its way: G is a gather, S a scatter.

# %% tags=["active-ipynb"]
# tables.print_events(reports)

# %% [markdown]
# ## 9. The proof
#
# Equal gradients have to give equal bits. How can they, with so much cut and moved?
#
# - Momentum works element by element, wherever an element is stored.
# - What travels is rounded to bfloat16. Newton-Schulz reads bfloat16 anyway, so this
#   rounds earlier, but not more.
# - The whole matrix goes through the same function as on one process.
# - The learning rate is scaled by the shape of the matrix, never by that of a shard.
#
# All of this holds for the long way as well.


# %%
def problems_in(
    reports: list[dict[str, Any]], schedule: Schedule, grid: Grid
) -> list[str]:
    """What does not hold, in words."""
    found = [
        f"rank {rank}: {way}: {differs}"
        for rank, report in enumerate(reports)
        for way, differs in report["differs"].items()
        if differs
    ]
    for rank, report in enumerate(reports):
        if report["groups"] != [grid.dp_group(rank), grid.tp_group(rank)]:
            found.append(f"rank {rank}: its groups are {report['groups']}")
        owned = [i for i, owner in enumerate(schedule.owners) if owner == rank]
        sent = sum(
            sum(packets)
            for bucket in schedule.buckets
            for packets in sent_by(schedule, bucket, rank).values()
        )
        for ahead, engine in report["engine"].items():
            where = f"rank {rank}, prefetch_count={ahead}"
            if engine["schedule"] != digest(schedule) or engine["owned"] != owned:
                found.append(f"{where}: another schedule than that of chapter 4")
            if engine["calls"] != len(owned):
                found.append(f"{where}: {engine['calls']} Newton-Schulz calls")
            if engine["sent"] != sent or engine["other"]:
                found.append(f"{where}: {engine['sent']} bytes and {engine['other']}")
    if not tables.same_launches(reports):
        found.append("the ranks start their collectives in different orders")
    return found


# %% tags=["active-ipynb"]
# problems = problems_in(reports, schedule, GRID)
# tables.print_proof(reports, len(layouts), STEPS, problems)

# %% [markdown]
# ## 10. The blueprint's words and ours
#
# The files are in `torch/optim/_muon_engine/`. "There" is the [proof of concept][poc]
# that the blueprint explains and repairs.
#
# [poc]: https://github.com/NVIDIA/Megatron-LM/pull/1428

# %% tags=["active-ipynb"]
# tables.print_terms()

# %% [markdown]
# ## 11. The blueprint's bugs
#
# Its README lists five bugs that had to be found. Each is a trap for whoever writes
# such a thing. This is how each is met here, and which test shows it.

# %% tags=["active-ipynb"]
# tables.print_fixes()

# %% [markdown]
# ## Sources
#
# - Keller Jordan et al., [Muon: An optimizer for hidden layers in neural
#   networks](https://kellerjordan.github.io/posts/muon/), 2024. The algorithm.
# - Jingyuan Liu et al., [Muon is Scalable for LLM
#   Training](https://arxiv.org/abs/2502.16982), 2025. Muon on ZeRO-1.
# - Jeremy Bernstein, [Deriving Muon](https://jeremybernste.in/writing/deriving-muon),
#   2025. Why to orthogonalize.
# - Samyam Rajbhandari et al., [ZeRO: Memory Optimizations Toward Training Trillion
#   Parameter Models](https://arxiv.org/abs/1910.02054), 2019. Sharded data parallelism.
# - Mohammad Shoeybi et al., [Megatron-LM: Training Multi-Billion Parameter Language
#   Models Using Model Parallelism](https://arxiv.org/abs/1909.08053), 2019. Tensor
#   parallelism.
# - Jen Wei, [A CPU-Friendly Tutorial for Distributed Muon
#   (DPxTP)](https://huggingface.co/datasets/bird-of-paradise/muon-distributed), 2025.
#   The blueprint.
#
# To cite the blueprint, Muon, and Muon at scale:
#
# ```bibtex
# @misc{wei2025muondistributed,
#   author       = {Wei, Jen},
#   title        = {A CPU-Friendly Tutorial for Distributed Muon (DPxTP)},
#   year         = {2025},
#   howpublished = {\url{https://huggingface.co/datasets/bird-of-paradise/muon-distributed}}
# }
#
# @misc{jordan2024muon,
#   author = {Jordan, Keller and others},
#   title  = {Muon: An optimizer for hidden layers in neural networks},
#   year   = {2024},
#   url    = {https://kellerjordan.github.io/posts/muon/}
# }
#
# @misc{liu2025muonscalable,
#   author = {Liu, Jingyuan and others},
#   title  = {Muon is Scalable for LLM Training},
#   year   = {2025},
#   url    = {https://arxiv.org/abs/2502.16982}
# }
# ```


# %% tags=["active-py"]
import argparse


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Walk through distributed Muon over DP x TP, on 8 CPU processes."
    )
    parser.add_argument("--grid", choices=("4x2", "2x4"), default="4x2", help="dp x tp")
    grid = Grid(*map(int, parser.parse_args().grid.split("x")))

    chapter(1, "The grid")
    tables.print_grid(grid)
    chapter(2, "What a rank holds")
    layouts = layouts_of(grid)
    tables.print_shards(layouts)
    chapter(3, "Who owns what")
    owners = assign_owners(layouts)
    tables.print_owners(layouts, owners)
    chapter(4, "The schedule")
    schedule = make_schedule(layouts, owners, NS_DTYPE)
    tables.print_buckets(schedule)
    tables.print_bytes(schedule, sent_by, lower_bound)
    chapter(5, "The long way")
    entries = master_plan(layouts, grid)
    buckets = bucket_sizes(entries, grid)
    stored = partial(run_of, buckets=buckets, grid=grid)
    tables.print_virtual_buffer(entries, buckets, list(AISLES), grid.dp, stored)
    chapter(6, "Eight processes")
    tables.show("start, take their steps, and report ...")
    sys.stdout.flush()
    reports = run(report_of, *grid)
    chapter(7, "The long way, counted")
    print_ways(reports, schedule, entries, grid)
    chapter(8, "The engine's step, as it happened")
    tables.print_events(reports)
    chapter(9, "The proof")
    problems = problems_in(reports, schedule, grid)
    tables.print_proof(reports, len(layouts), STEPS, problems)
    chapter(10, "The blueprint's words and ours")
    tables.print_terms()
    chapter(11, "The blueprint's bugs")
    tables.print_fixes()
    for problem in problems:
        print(f"blueprint: {problem}", file=sys.stderr)
    return 1 if problems else 0


def chapter(number: int, title: str) -> None:
    print(f"\n{number}. {title}\n")


if __name__ == "__main__":
    sys.exit(main())
