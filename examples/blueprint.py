# %% [markdown]
"""# The blueprint: distributed Muon over DP x TP, on eight CPU processes

Muon turns the whole momentum matrix of each weight into a nearly orthogonal one. In a large training,
no process has a whole matrix. Data parallelism (DP, of the kind that shards) and tensor parallelism
(TP) leave each process with a piece of it, a *shard*. So the shards must meet.

Jen Wei's [CPU-friendly tutorial][wei], the "blueprint", walks one way there:

    DP gather -> TP gather -> orthogonalize -> TP shard -> DP shard

This notebook answers it with the Muon of this repository. It walks the blueprint's way, step by step.
It then follows a shorter one: every matrix has one owner, its shards go to the owner and nowhere else,
and the owner orthogonalizes the matrix once for all ranks.

The script `blueprint.py` is the same text and the same code. It starts eight processes, and ends with a
proof. Its exit code is 1 if the proof fails:

    python examples/blueprint.py

`jupytext --to ipynb --update examples/blueprint.py` makes the notebook. To read both the text and the
output takes ten minutes.

[wei]: https://huggingface.co/datasets/bird-of-paradise/muon-distributed
"""

# %% tags=["active-ipynb"]
# # A hosted notebook has no NumPy, no repository and no torch with this Muon. This installs them.
# import importlib
# import os
# import subprocess
# import sys
# from importlib.util import find_spec
# from pathlib import Path
#
# REPOSITORY = os.environ.get("MUON_REPOSITORY", "")  # or write its address here
# clone = Path("distributed-muon")
# places = [Path(), Path("examples"), clone / "examples"]
#
#
# def run_command(*command):
#     done = subprocess.run(command, capture_output=True, text=True)
#     print(done.stdout + done.stderr)
#     done.check_returncode()
#
#
# def has_overlay():
#     torch = find_spec("torch")  # an import would keep a torch without the overlay
#     return bool(torch) and (Path(torch.origin).parent / "optim" / "muon.py").exists()
#
#
# if not any((place / "blueprint.py").exists() for place in places):
#     if not REPOSITORY:
#         raise RuntimeError("Write this repository's address into REPOSITORY.")
#     run_command("git", "clone", "--depth", "1", REPOSITORY, clone)
# if clone.exists() and not has_overlay():
#     run_command(sys.executable, "-m", "pip", "install", "numpy", "torch==2.13.0")
#     overlay = clone / "setup_overlay.py"
#     run_command(sys.executable, overlay, "apply", "--python", sys.executable)
#     importlib.invalidate_caches()
#     importlib.import_module("_distributed_muon_torch")  # as Python does when it starts
#
# # The notebook finds the script, and a torch that has this Muon.
# here = next(place for place in places if (place / "blueprint.py").exists())
# sys.path.insert(0, str(here.resolve()))
# if not has_overlay():
#     raise ImportError(
#         "This kernel needs the overlay: `python3 setup_overlay.py env`, then "
#         "`.venv/bin/python -m pip install jupyterlab`, and start the notebook with "
#         "`.venv/bin/python -m jupyterlab examples/blueprint.ipynb`."
#     )

# %%
import math
import tempfile
import zlib
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    parallelize_module,
    RowwiseParallel,
)
from torch.optim import Muon
from torch.optim._muon_engine.layouts.layout import Key, Layout
from torch.optim._muon_engine.layouts.dtensor import DTensorLayouts
from torch.optim._muon_engine.schedule.buckets import make_schedule
from torch.optim._muon_engine.schedule.owners import assign_owners, newton_schulz_flops
from torch.optim._muon_engine.schedule.schedule import Schedule
from torch.optim._newton_schulz import newton_schulz, NS_DTYPE
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode


# %% [markdown]
# ## 1. The grid
#
# Eight processes form a grid. The number of a process is its *rank*.
#
# - The ranks of a column are a DP group. They see different data, and each stores some of the rows of
#   the matrices that they share.
# - The ranks of a row are a TP group. They see the same data, and each does a part of each layer's work.
#
# Every rank is in one group of each kind. On a cluster, a TP group is inside one machine, where links
# are fast. A DP group spans machines.

# %%
DP, TP = 4, 2
RANKS = range(DP * TP)


def dp_group(rank: int) -> list[int]:
    return [r for r in RANKS if r % TP == rank % TP]


def tp_group(rank: int) -> list[int]:
    return [r for r in RANKS if r // TP == rank // TP]


if __name__ == "__main__":
    print("The grid\n\nrank  (dp, tp)  DP group      TP group")
    for rank in RANKS:
        groups = (" ".join(map(str, group(rank))) for group in (dp_group, tp_group))
        print("{:4}  {!s:8}  {:12}  {}".format(rank, divmod(rank, TP), *groups))

# %% [markdown]
# ## 2. The shards of a rank
#
# The model has the matrices of six small transformer blocks: four in each, 24 in all. PyTorch cuts each
# matrix twice:
#
# - TP cuts first. Each rank gets some rows of `qkv` and `up` (PyTorch calls these layers
#   *column-parallel*) and some columns of `out` and `down` (*row-parallel*).
# - FSDP2 (`fully_shard`) then cuts the rows of TP's piece.
#
# Momentum is cut in the same way as its weight.
#
# DTensor calls this *placements*, one for each dimension of the grid. The engine does not interpret
# them. Its *reader* asks DTensor which rectangles of each matrix each rank holds, its *regions*. The
# answer is a *layout*.
#
# Chapters 2 to 5 are arithmetic. They need only this process, and a process group that pretends to have
# eight ranks.

# %%
WIDTH, BLOCKS = 32, 6
# Two parameter groups, each with its learning rate: the blueprint's "aisles".
AISLES = {"attention": (("qkv", "out"), 0.02), "mlp": (("up", "down"), 0.01)}
RATES = [lr for _, lr in AISLES.values()]
# The dimension of the weight that TP cuts.
TP_DIM = {"qkv": 0, "out": 1, "up": 0, "down": 1}


class Block(nn.Module):
    """The matrices of a transformer block. The gradients will be random."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)


def build(mesh: DeviceMesh | None) -> list[dict[str, Any]]:
    """The parameter groups of the model, equal on every rank; sharded if there is a ``mesh``."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
    styles = (ColwiseParallel(), RowwiseParallel())
    plan = {kind: styles[dim] for kind, dim in TP_DIM.items()}
    for block in blocks if mesh is not None else ():
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    groups = []
    for kinds, lr in AISLES.values():
        named = ((n.removesuffix(".weight"), p) for n, p in blocks.named_parameters())
        params = [(name, p) for name, p in named if name[2:] in kinds]
        groups.append({"params": params, "lr": lr})
    return groups


def layouts_of() -> list[Layout]:
    """The layout of each matrix, in the optimizer's order."""
    world = len(RANKS)
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
        pairs = [pair for group in build(mesh) for pair in group["params"]]
        reader = DTensorLayouts()
        keyed = ((Key(i, 0, name), param) for i, (name, param) in enumerate(pairs))
        return [layout for key, param in keyed for layout in reader.of(key, param)]
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    layouts = layouts_of()
    print("\nThe shards of a rank\n")
    named = {layout.key.name: layout for layout in layouts}
    for name in ("0.qkv", "0.out"):
        layout = named[name]
        rows, columns = layout.shape
        print(f"{name} is {rows} x {columns}: {layout.placement}")
        for rank in RANKS:
            (region,) = layout.shards.of(rank)
            rows = f"rows {region.row} to {region.row + region.height - 1}"
            last = region.column + region.width - 1
            print(f"  rank {rank}  {rows:14}  columns {region.column} to {last}")

# %% [markdown]
# ## 3. The owners
#
# Each matrix gets one *owner*. Only the owner orthogonalizes it. Any rank of the grid can be an owner.
#
# The engine assigns the matrix with the most work first, and each matrix to the rank with the least
# work so far. It counts the floating-point operations (FLOPs) of Newton-Schulz, the iteration that
# orthogonalizes. Every rank computes the owners for itself, and all ranks get the same answer.


# %%
if __name__ == "__main__":
    owners = assign_owners(layouts)
    flops: Counter[int] = Counter()
    names: dict[int, list[str]] = {rank: [] for rank in RANKS}
    for layout, owner in zip(layouts, owners):
        flops[owner] += newton_schulz_flops(layout.shape)
        names[owner].append(layout.key.name)
    mean = flops.total() / len(RANKS)
    print("\nThe owners; 1.00 is an equal share of the work\n")
    for rank in RANKS:
        share = flops[rank] / mean
        bar = "#" * round(30 * share)
        print(f"{rank:4}  {' '.join(names[rank]):20}  {share:.2f}  {bar}")

# %% [markdown]
# ## 4. The schedule
#
# The engine sends the matrices in *buckets*: neither one by one, nor all at once. In a bucket, each
# owner has about the same work. A bucket has two collectives, each of them one `all_to_all_single` over
# all ranks:
#
# - the *gather*: every rank sends its shards, rounded to bfloat16, to their owners;
# - the *scatter*: every owner sends each rank its regions of the results.
#
# The schedule follows from layouts and owners alone. The engine makes it once, before the first step.
#
# A step cannot send less than this: an owner receives the shards that it lacks, and each other rank
# receives its part of the result. The schedule sends exactly that.


# %%
def sent_by(schedule: Schedule, rank: int) -> int:
    """The bytes that ``rank`` sends in a step."""
    packs = (schedule.packs(bucket, rank) for bucket in schedule.buckets)
    sides = (side for pack in packs for side in (pack.gather_send, pack.scatter_send))
    return sum(sum(side.split_sizes) for side in sides) * NS_DTYPE.itemsize


def least_bytes(schedule: Schedule, rank: int) -> int:
    """Its shards to their owners; as an owner, the rest of each result."""
    elements = 0
    for layout, owner in zip(schedule.layouts, schedule.owners):
        own = layout.shards.numel_of(rank)
        elements += layout.numel - own if owner == rank else own
    return elements * NS_DTYPE.itemsize


if __name__ == "__main__":
    schedule = make_schedule(layouts, owners)
    buckets = "".join(f"bucket {bucket.index:<5}" for bucket in schedule.buckets)
    print(f"\nThe schedule\n\nrank  {buckets}{'bytes sent':>12}{'least':>8}")
    for rank in RANKS:
        row = ""
        for bucket in schedule.buckets:
            owned = (m for m in bucket.matrices if schedule.owners[m] == rank)
            row += f"{' '.join(schedule.layouts[m].key.name for m in owned):12}"
        sent, least = sent_by(schedule, rank), least_bytes(schedule, rank)
        print(f"{rank:4}  {row}{sent:12}{least:8}")

# %% [markdown]
# ## 5. The long way
#
# The blueprint's own route uses plain collectives. It belongs to ZeRO-1: DP cuts the state of the
# optimizer, but not matrix by matrix.
#
# - A *virtual buffer* has a rank's TP slices end to end. It is virtual because no rank stores all of it.
#   Each parameter group has one (an *aisle*, `buffer_idx`).
# - The slices fill *buckets* (*pallets*, `bucket_idx`) of the buffer. Each bucket is cut into equal runs,
#   one for each member of the DP group. A rank stores its run.
# - The *master schedule* (`dist_meta`) says where each matrix is. Here it is a list of entries.
#
# A run ignores where a matrix ends. It may start in the middle of a matrix.


# %%
class Entry(NamedTuple):
    """One line of the master schedule: the place of a matrix's TP slice."""

    name: str
    bucket: tuple[int, int]  # aisle and number
    start: int  # first element within the bucket
    shape: tuple[int, int]  # of the TP slice
    tp_dim: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


BUCKET = 12288  # elements


def master_schedule(layouts: list[Layout]) -> list[Entry]:
    entries: list[Entry] = []
    for layout in layouts:
        kind = layout.key.name[2:]
        aisle = [kind in kinds for kinds, _ in AISLES.values()].index(True)
        rows, columns = layout.shape
        tp_dim = TP_DIM[kind]
        shape = (rows, columns // TP) if tp_dim else (rows // TP, columns)
        number = start = 0
        if entries and entries[-1].bucket[0] == aisle:
            number, start = entries[-1].bucket[1], entries[-1].stop
        if start + math.prod(shape) > BUCKET:
            number, start = number + 1, 0
        entries.append(Entry(layout.key.name, (aisle, number), start, shape, tp_dim))
    return entries


def run_of(entry: Entry, row: int) -> slice:
    """The part of a flattened slice in the run of the DP group's member ``row``."""
    length = BUCKET // DP  # all buckets are full here; others would need padding
    first = max(entry.start, row * length) - entry.start
    last = min(entry.stop, (row + 1) * length) - entry.start
    return slice(first, max(first, last))


if __name__ == "__main__":
    entries = master_schedule(layouts)
    count = len({entry.bucket for entry in entries})
    print(f"\nThe long way: {count} buckets of {DP} runs of {BUCKET // DP} elements\n")
    for entry in entries[:4]:
        size = " x ".join(map(str, entry.shape))
        print(f"  {entry.name}  bucket {entry.bucket}  slice {size:8}", end="")
        for row in range(DP):
            if run := range(math.prod(entry.shape))[run_of(entry, row)]:
                print(f"  dp {row}: {run[0]} to {run[-1]}", end="")
        print()

# %% [markdown]
# The journey has five steps. Steps 1 and 2 communicate, steps 4 and 5 only slice:
#
# 1. **DP gather.** `all_gather` each bucket over the DP group. Now each rank has all of its TP slices.
# 2. **TP gather.** `all_gather` a slice over the TP group. Now each rank of the TP group has the matrix.
# 3. **Run the math.** Each of them orthogonalizes it.
# 4. **TP shard.** Keep the TP slice, drop the rest.
# 5. **DP shard.** Keep the run, drop the rest.
#
# A rank takes steps 2 to 5 for each matrix of which its run has a part.
#
# The DP gather is bucketed, and the TP gather is not. Each call has a fixed cost, its latency. Across
# machines the latency is high, so many small messages share one call. Inside a machine it is low, and
# with one call per matrix only one whole matrix is in memory at a time.
#
# Momentum, learning rate and the rest are those of the Muon here, so that both ways can be compared.


# %%
class LongWay:
    """Muon by the blueprint's route. ``params`` and ``momentum`` are this rank's runs."""

    def __init__(
        self, whole: dict[str, Tensor], entries: list[Entry], mesh: DeviceMesh
    ):
        self.entries = entries
        self.row, self.column = mesh.get_coordinate()
        self.dp_group, self.tp_group = mesh.get_group("dp"), mesh.get_group("tp")
        self.params = {e.name: self.shard(whole[e.name], e).clone() for e in entries}
        self.momentum = {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.calls: Counter[str] = Counter()
        self.sent = 0
        self.journey: list[str] = []

    def shard(self, matrix: Tensor, entry: Entry) -> Tensor:
        """TP shard, then DP shard."""
        tp_slice = matrix.chunk(TP, dim=entry.tp_dim)[self.column]
        return tp_slice.reshape(-1)[run_of(entry, self.row)]

    def step(self, grads: dict[str, Tensor], hyper: dict[str, Any]) -> None:
        mu = hyper["momentum"]
        runs: dict[str, Tensor] = {}
        for entry in self.entries:
            grad = self.shard(grads[entry.name], entry)
            momentum = self.momentum[entry.name].lerp_(grad, 1 - mu)
            # Nesterov looks ahead along the gradient. The ranks exchange bfloat16.
            runs[entry.name] = torch.lerp(grad, momentum, mu).bfloat16()
        slices: dict[str, Tensor] = {}
        for key in dict.fromkeys(entry.bucket for entry in self.entries):
            inside = [entry for entry in self.entries if entry.bucket == key]
            # 1. DP gather
            run = torch.cat([runs[entry.name] for entry in inside])
            bucket = self.all_gather("DP gather", run, self.dp_group).flatten()
            slices |= {e.name: bucket[e.start : e.stop].view(e.shape) for e in inside}
        for entry in self.entries:
            if runs[entry.name].numel():
                self.update(entry, runs[entry.name], slices[entry.name], hyper)

    def update(self, entry: Entry, run: Tensor, tp_slice: Tensor, hyper: dict) -> None:
        # 2. TP gather
        slices = self.all_gather("TP gather", tp_slice, self.tp_group)
        matrix = torch.cat(list(slices), dim=entry.tp_dim)
        # 3. Run the math
        coefficients, steps = hyper["ns_coefficients"], hyper["ns_steps"]
        update = newton_schulz(matrix.to(NS_DTYPE), coefficients, steps, hyper["eps"])
        self.calls["Newton-Schulz"] += 1
        # 4. TP shard, 5. DP shard
        update_run = self.shard(update, entry)

        lr, param = RATES[entry.bucket[0]], self.params[entry.name]
        param.mul_(1 - lr * hyper["weight_decay"])
        # The scale is that of the whole matrix, not of the run.
        rows, columns = matrix.shape
        param.add_(update_run, alpha=-lr * math.sqrt(max(1, rows / columns)))
        shapes = [tuple(t.shape) for t in (run, tp_slice, matrix, tp_slice, update_run)]
        self.journey = self.journey or list(map(str, shapes))

    def all_gather(self, what: str, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        gathered = tensor.new_empty((group.size(), *tensor.shape))
        dist.all_gather(list(gathered), tensor.contiguous(), group=group)
        self.calls[what] += 1
        self.sent += tensor.nbytes * (group.size() - 1)
        return gathered


# %% [markdown]
# ## 6. Eight processes
#
# In each process, a job takes three steps with the same gradients, three times over: alone, with the
# whole matrices; with the engine; and by the long way. All of them must end with the same bits as the
# process alone. `SentBytes` counts the bytes of the engine's collectives.

# %%
STEPS = 3


class SentBytes(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base_" in str(func):
            packed, splits = args[1], args[4]
            self.count += (sum(splits) - splits[dist.get_rank()]) * packed.itemsize
        return func(*args, **(kwargs or {}))


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """The same on every rank."""
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def like(whole: Tensor, tensor: Tensor) -> Tensor:
    """``whole``, sharded as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh, shard = tensor.device_mesh, tensor.to_local().shape
    row, column = mesh.get_coordinate()
    tp_dim = int(shard[1] < whole.shape[1])
    local = whole.chunk(TP, dim=tp_dim)[column].chunk(DP)[row].contiguous()
    return DTensor.from_local(local, mesh, tensor.placements, run_check=False)


def matrices_of(muon: Muon) -> dict[str, nn.Parameter]:
    groups = muon.param_groups
    return {n: p for g in groups for n, p in zip(g["param_names"], g["params"])}


def train(muon: Muon) -> None:
    for step in range(STEPS):
        for name, param in matrices_of(muon).items():
            param.grad = like(gradient(name, param.shape, step), param)
        muon.step()


def values_of(muon: Muon) -> dict[str, tuple[Tensor, Tensor]]:
    return {
        name: (param.detach(), muon.state[param]["momentum_buffer"])
        for name, param in matrices_of(muon).items()
    }


def report_of(mesh: DeviceMesh) -> dict[str, Any]:
    """The figures of one rank. ``differing`` has the matrices that are not bitwise equal."""
    alone = Muon(build(None))
    start = {name: p.detach().clone() for name, p in matrices_of(alone).items()}
    train(alone)
    expected = values_of(alone)
    muon = Muon(build(mesh), distributed_config="auto")
    with SentBytes() as sent:
        train(muon)
    differing = [
        name
        for name, pair in values_of(muon).items()
        for mine, whole in zip(pair, expected[name])
        if not torch.equal(mine.to_local(), like(whole, mine).to_local())
    ]
    report: dict[str, Any] = {"differing": {"the engine": differing}}
    report["sent"] = sent.count // STEPS
    report["owned"] = muon.assignments[dist.get_rank()]

    entries = master_schedule(list(muon._engine.schedule.layouts))
    long = LongWay(start, entries, mesh)
    for step in range(STEPS):
        grads = {name: gradient(name, p.shape, step) for name, p in start.items()}
        long.step(grads, alone.defaults)
    report["differing"]["the long way"] = [
        entry.name
        for entry in entries
        for mine, whole in zip((long.params, long.momentum), expected[entry.name])
        if not torch.equal(mine[entry.name], long.shard(whole, entry))
    ]
    report["long calls"] = {what: n // STEPS for what, n in long.calls.items()}
    report["long sent"], report["journey"] = long.sent // STEPS, long.journey
    groups = long.dp_group, long.tp_group
    report["groups"] = [dist.get_process_group_ranks(group) for group in groups]
    return report


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)  # equal bits need equal sums
    here = {"rank": rank, "world_size": len(RANKS)}
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", **here)
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    torch.save(report_of(mesh), f"{folder}/{rank}")
    dist.destroy_process_group()


# %% [markdown]
# A spawned process is a fresh Python that imports the function to run, and it cannot import a function
# from a notebook. So the job comes from the file, `blueprint.py`. A change in the cell above has no
# effect on it.

# %%
if __name__ == "__main__":
    import blueprint

    print("\nEight processes take their steps ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(blueprint.work, (folder,), nprocs=len(RANKS))
        files = (f"{folder}/{rank}" for rank in RANKS)
        reports = [torch.load(file, weights_only=False) for file in files]

# %% [markdown]
# ## 7. The cost of both ways
#
# The first lines show the shapes of rank 0's first matrix on its journey. The table compares the ways.
# The bytes are those of the calls that the ranks made.
#
# The table leaves out the work after the optimizer. ZeRO-1 and FSDP2 must gather the changed weights
# before the next forward pass.


# %%
if __name__ == "__main__":
    print("\nThe cost of both ways\n")
    names = ("its run", "DP gather", "TP gather", "TP shard", "DP shard")
    print(" -> ".join(map("{} {}".format, names, reports[0]["journey"])))
    least = sum(least_bytes(schedule, rank) for rank in RANKS)
    long = [report["long calls"] for report in reports]
    rows = {
        "the engine": (
            [len(report["owned"]) for report in reports],
            sum(report["sent"] for report in reports),
            2 * len(schedule.buckets),
        ),
        "the long way": (
            [rank["Newton-Schulz"] for rank in long],
            sum(report["long sent"] for report in reports),
            max(rank["DP gather"] + rank["TP gather"] for rank in long),
        ),
    }
    heads = ("Newton-Schulz", "busiest rank", "bytes sent", "x least", "collectives")
    print(f"\n{'a step':14}" + "".join(f"{head:>14}" for head in heads))
    for name, (calls, sent, collectives) in rows.items():
        cells = (sum(calls), max(calls), sent, f"{sent / least:.2f}", collectives)
        print(f"{name:14}" + "".join(f"{cell:>14}" for cell in cells))

# %% [markdown]
# ## 8. The proof
#
# Equal gradients must give equal bits, although the ranks cut and sent so much. Four facts make it so:
#
# - Momentum works element by element, wherever an element is stored.
# - The ranks exchange bfloat16. Newton-Schulz reads bfloat16 anyway, so this rounds earlier, but not
#   more.
# - The whole matrix goes through the same function as on one process.
# - The learning rate is scaled by the shape of the matrix, never by that of a shard.
#
# The same holds for the long way.


# %%
def prove(reports: list[dict], schedule: Schedule) -> list[str]:
    """Prints the proof. Returns the facts that do not hold, in words."""
    problems = []
    matrices = len(schedule.layouts)
    print(f"\nThe proof: {STEPS} steps, {matrices} matrices, {len(RANKS)} ranks")
    for way in reports[0]["differing"]:
        wrong = {name for report in reports for name in report["differing"][way]}
        print(f"  {way:28} bitwise equal: {'NO' if wrong else 'yes'}")
        problems += [f"{way}: {name} differs" for name in sorted(wrong)]
    for rank, report in enumerate(reports):
        owned = [i for i, owner in enumerate(schedule.owners) if owner == rank]
        groups, sends = [dp_group(rank), tp_group(rank)], sent_by(schedule, rank)
        if (report["groups"], report["owned"]) != (groups, owned):
            problems.append(f"rank {rank}: other groups or owners")
        if report["sent"] != sends:
            problems.append(f"rank {rank}: sends {report['sent']} bytes")
    outcome = "NO" if problems else "yes"
    print(f"  the ranks did what chapters 1 to 4 calculated: {outcome}")
    return problems


if __name__ == "__main__":
    if problems := prove(reports, schedule):
        raise RuntimeError("; ".join(problems))

# %% [markdown]
# ## 9. The blueprint's words and ours
#
# The files are in `torch/optim/_muon_engine/`. "There" is the [proof of concept][poc] that the blueprint
# explains and repairs.
#
# | there | here | difference |
# |---|---|---|
# | `dist_group`, `tp_group` | one group of a matrix's holders (process_groups.py: spanning_group) | There, pieces cross two groups in sequence. Here they cross one, which spans the grid. |
# | `param_groups`, `buffer_idx` (aisles) | the matrices that the same ranks hold (schedule/buckets.py: families) | There, each parameter group has a buffer. Here a bucket takes matrices of several parameter groups. |
# | buckets, `bucket_idx` (pallets) | buckets (schedule/schedule.py: Bucket) | There, the order of the parameters fills a bucket. Here each owner has work in each bucket. |
# | `dist_meta` (master schedule) | a layout and a schedule (layouts/layout.py: Layout) | `dist_meta` has this rank's ranges. A layout has every rank's regions, and the ranks compare theirs (agreement.py: agree). |
# | `global_buffer_size` (virtual buffer) | a slot for each bucket in flight (runtime/transport.py: slot) | There, a step makes room for all TP slices with padding. A slot has room for one bucket and no padding. Accelerators free it between steps. |
# | DP gather, TP gather | the gather of a bucket (runtime/transport.py: start_gather) | There, all ranks get everything. Here the owner gets the shards that it lacks. |
# | run math | Newton-Schulz on the owner (runtime/compute.py: compute) | There, each rank with a part of a matrix orthogonalizes all of it. |
# | TP shard, DP shard | the scatter of a bucket (runtime/transport.py: start_scatter) | There, each rank has the whole result and slices it. Here the owner sends the regions. |
# | ZeRO-1 | momentum is placed as its parameter (runtime/params.py: ParamInputs) | There, DP cuts momentum and the optimizer's copy of the weights. Here FSDP2 cuts both, and DDP neither. |
#
# [poc]: https://github.com/NVIDIA/Megatron-LM/pull/1428
#
# ## 10. The blueprint's bugs
#
# Its README lists five bugs. Everyone who writes such an optimizer meets them.
#
# | bug | here | test |
# |---|---|---|
# | the line `params = group["params"]` was missing | A step has one list of all matrices, each with the options of its group. | test_indices_follow_the_groups |
# | the gathered matrix was still flat | Regions have a place in their matrix and must tile it. | test_no_tilings |
# | the backend was always nccl | The groups are the user's. Here they run gloo. | test_notebook |
# | the device was always cuda | Buffers are on the device of the parameters. Here it is the CPU. | test_notebook |
# | processes that a notebook spawns crash | They import the function to run from the script. | test_notebook |
#
# ## Sources
#
# - Jeremy Bernstein, [Deriving Muon](https://jeremybernste.in/writing/deriving-muon), 2025.
# - Samyam Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054), 2019. Sharded data parallelism.
# - Mohammad Shoeybi et al., [Megatron-LM](https://arxiv.org/abs/1909.08053), 2019. Tensor parallelism.
#
# The blueprint, the algorithm, and Muon on ZeRO-1, to cite:
#
# ```bibtex
# @misc{wei2025muondistributed,
#   author       = {Wei, Jen},
#   title        = {A CPU-Friendly Tutorial for Distributed Muon (DPxTP)},
#   year         = {2025},
#   howpublished = {\url{https://huggingface.co/datasets/bird-of-paradise/muon-distributed}}
# }
# @misc{jordan2024muon,
#   author = {Jordan, Keller and others},
#   title  = {Muon: An optimizer for hidden layers in neural networks},
#   year   = {2024},
#   url    = {https://kellerjordan.github.io/posts/muon/}
# }
# @misc{liu2025muonscalable,
#   author = {Liu, Jingyuan and others},
#   title  = {Muon is Scalable for LLM Training},
#   year   = {2025},
#   url    = {https://arxiv.org/abs/2502.16982}
# }
# ```
