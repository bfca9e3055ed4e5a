# %% [markdown]
"""# The blueprint: distributed Muon over DP x TP, on eight CPU processes

Muon turns the whole momentum matrix of each weight into a nearly orthogonal one. In a large training,
no process has a whole matrix. Data parallelism (DP, of the kind that shards) and tensor parallelism
(TP) leave each process with a piece of it, a *shard*. So the shards must meet.

Jen Wei's [CPU-friendly tutorial][wei], the "blueprint", walks one way there:

    DP gather -> TP gather -> orthogonalize -> TP shard -> DP shard

This notebook answers it with the Muon of this repository. It walks the blueprint's way, step by step.
It then takes a shorter one: every matrix has one owner, its shards go to the owner and nowhere else,
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import SentBytes
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Muon
from torch.optim._newton_schulz import newton_schulz, NS_DTYPE


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


if __name__ == "__main__":
    print("The grid: each row is a TP group, each column a DP group\n")
    for dp in range(DP):
        print("  ", *RANKS[dp * TP : (dp + 1) * TP])

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
# DTensor calls this *placements*, one for each dimension of the grid. Muon does not interpret them. It
# asks DTensor which rectangles of each matrix each rank holds.

# %%
WIDTH, BLOCKS = 32, 6
SHAPES = {
    "qkv": (3 * WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (4 * WIDTH, WIDTH),
    "down": (WIDTH, 4 * WIDTH),
}
# The dimension of the weight that TP cuts.
TP_DIM = {"qkv": 0, "out": 1, "up": 0, "down": 1}
# Two parameter groups, each with its learning rate: the blueprint's "aisles".
AISLES, RATES = (("qkv", "out"), ("up", "down")), (0.02, 0.01)
# Of weights that fully_shard cuts after TP cut rows (0) or columns (1), on a mesh of DP x TP.
PLACEMENTS = {
    0: (_StridedShard(0, split_factor=TP), Shard(0)),
    1: (Shard(0), Shard(1)),
}


class Matrix(NamedTuple):
    name: str
    aisle: int
    shape: tuple[int, int]
    tp_dim: int


MATRICES = [
    Matrix(f"{block}.{kind}", aisle, SHAPES[kind], TP_DIM[kind])
    for aisle, kinds in enumerate(AISLES)
    for block in range(BLOCKS)
    for kind in kinds
]


def shard_of(whole: Tensor, matrix: Matrix, rank: int) -> Tensor:
    dp, tp = divmod(rank, TP)
    return whole.chunk(TP, dim=matrix.tp_dim)[tp].chunk(DP)[dp]


if __name__ == "__main__":
    print("\nThe shards of a rank\n")
    for matrix in MATRICES[:2]:
        shape = tuple(shard_of(torch.empty(matrix.shape), matrix, 0).shape)
        print(
            f"  {matrix.name}, {matrix.shape}: {shape} by {PLACEMENTS[matrix.tp_dim]}"
        )

# %% [markdown]
# ## 3. The long way
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

    matrix: Matrix
    bucket: tuple[int, int]  # aisle and number
    start: int  # first element within the bucket
    shape: tuple[int, int]  # of the TP slice

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


BUCKET = 12288  # elements


def master_schedule() -> list[Entry]:
    entries: list[Entry] = []
    bucket, start = (0, 0), 0
    for matrix in MATRICES:
        rows, columns = matrix.shape
        shape = (rows, columns // TP) if matrix.tp_dim else (rows // TP, columns)
        if bucket[0] != matrix.aisle:
            bucket, start = (matrix.aisle, 0), 0
        elif start + math.prod(shape) > BUCKET:
            bucket, start = (matrix.aisle, bucket[1] + 1), 0
        entries.append(Entry(matrix, bucket, start, shape))
        start = entries[-1].stop
    return entries


def run_of(entry: Entry, dp: int) -> slice:
    """The part of a flattened slice in the run of the DP group's member ``dp``."""
    length = BUCKET // DP  # all buckets are full here; others would need padding
    first = max(entry.start, dp * length) - entry.start
    last = min(entry.stop, (dp + 1) * length) - entry.start
    return slice(first, max(first, last))


if __name__ == "__main__":
    entries = master_schedule()
    count = len({entry.bucket for entry in entries})
    print(f"\nThe long way: {count} buckets of {DP} runs of {BUCKET // DP} elements\n")
    for entry in entries[:4]:
        runs = [run_of(entry, dp) for dp in range(DP)]
        sizes = [run.stop - run.start for run in runs]
        print(
            f"  {entry.matrix.name}  bucket {entry.bucket}  elements of each run {sizes}"
        )

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
# The DP gather is bucketed, and the TP gather is not. Each call has a fixed cost, its latency. Between
# machines the latency is high, so many small messages share one call. Inside a machine it is low, and
# with one call per matrix only one whole matrix is in memory at a time.
#
# Momentum, learning rate and the rest are those of the Muon here, so that both ways can be compared.


# %%
class LongWay:
    """Muon by the blueprint's route. ``params`` and ``momentum`` are this rank's runs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.entries = master_schedule()
        self.dp, self.tp = mesh.get_coordinate()
        self.dp_group, self.tp_group = mesh.get_group("dp"), mesh.get_group("tp")
        self.params = [self.shard(random(e.matrix, 0), e).clone() for e in self.entries]
        self.momentum = [torch.zeros_like(p) for p in self.params]
        self.calls = self.sent = 0

    def shard(self, whole: Tensor, entry: Entry) -> Tensor:
        """TP shard, then DP shard."""
        tp_slice = whole.chunk(TP, dim=entry.matrix.tp_dim)[self.tp]
        return tp_slice.reshape(-1)[run_of(entry, self.dp)]

    def step(self, step: int, hyper: dict[str, Any]) -> None:
        runs: list[Tensor] = []
        buckets: dict[tuple[int, int], list[Tensor]] = {}
        for entry, momentum in zip(self.entries, self.momentum):
            grad = self.shard(random(entry.matrix, step), entry)
            momentum.lerp_(grad, 1 - hyper["momentum"])
            # Nesterov looks ahead along the gradient. The ranks exchange bfloat16.
            run = torch.lerp(grad, momentum, hyper["momentum"]).bfloat16()
            runs.append(run)
            buckets.setdefault(entry.bucket, []).append(run)
        gathered = {}
        for bucket, inside in buckets.items():
            # 1. DP gather
            run = torch.cat(inside)
            gathered[bucket] = self.all_gather(run, self.dp_group)
        for entry, run, param in zip(self.entries, runs, self.params):
            if run.numel():
                bucket = torch.cat(gathered[entry.bucket])
                tp_slice = bucket[entry.start : entry.stop].view(entry.shape)
                self.update(entry, tp_slice, param, hyper)

    def update(
        self, entry: Entry, tp_slice: Tensor, param: Tensor, hyper: dict[str, Any]
    ) -> None:
        # 2. TP gather
        slices = self.all_gather(tp_slice, self.tp_group)
        whole = torch.cat(slices, dim=entry.matrix.tp_dim)
        # 3. Run the math
        coefficients, steps = hyper["ns_coefficients"], hyper["ns_steps"]
        update = newton_schulz(whole.to(NS_DTYPE), coefficients, steps, hyper["eps"])
        self.calls += 1
        # 4. TP shard, 5. DP shard
        update_run = self.shard(update, entry)

        lr = RATES[entry.matrix.aisle]
        param.mul_(1 - lr * hyper["weight_decay"])
        # The scale is that of the whole matrix, not of the run.
        rows, columns = whole.shape
        param.add_(update_run, alpha=-lr * math.sqrt(max(1, rows / columns)))

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(gathered, tensor, group=group)
        self.sent += tensor.nbytes * (group.size() - 1)
        return gathered


# %% [markdown]
# ## 4. The short way
#
# Each matrix gets one *owner*. Only the owner orthogonalizes it. Any rank of the grid can be an owner.
# Muon assigns the matrix with the most work first, and each matrix to the rank with the least work so
# far. Every rank computes the owners for itself, and all ranks get the same answer.
#
# The matrices travel in *buckets*: neither one by one, nor all at once. A bucket has two collectives,
# each of them one `all_to_all_single` over all ranks:
#
# - the *gather*: every rank sends its shards, rounded to bfloat16, to their owners;
# - the *scatter*: every owner sends each rank its part of the results.
#
# A step cannot send less than this: an owner receives the shards that it lacks, and each other rank
# receives its part of the result. Muon sends exactly that.


# %%
def random(matrix: Matrix, step: int) -> Tensor:
    """The first weights (step 0), or the gradients of a step. They are equal on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{matrix} {step}".encode()))
    return torch.randn(matrix.shape, generator=generator)


def placed(whole: Tensor, matrix: Matrix, mesh: DeviceMesh | None) -> Tensor:
    """``whole`` without a mesh, and this rank's shard of it on a mesh."""
    if mesh is None:
        return whole
    shard = shard_of(whole, matrix, dist.get_rank()).contiguous()
    return DTensor.from_local(shard, mesh, PLACEMENTS[matrix.tp_dim])


def trained(steps: int, mesh: DeviceMesh | None) -> Muon:
    """Muon after some steps: on one process, or on the ranks of a mesh."""
    groups: list[dict[str, Any]] = [{"params": [], "lr": lr} for lr in RATES]
    params = []
    for matrix in MATRICES:
        params.append(nn.Parameter(placed(random(matrix, 0), matrix, mesh)))
        groups[matrix.aisle]["params"].append(params[-1])
    muon = Muon(groups, distributed_config=None if mesh is None else "auto")
    for step in range(1, steps + 1):
        for matrix, param in zip(MATRICES, params):
            param.grad = placed(random(matrix, step), matrix, mesh)
        muon.step()
    return muon


def least_bytes(rank: int, owned: list[int]) -> int:
    """Its shards to their owners; as an owner, the rest of each result."""
    elements = 0
    for index, matrix in enumerate(MATRICES):
        numel = math.prod(matrix.shape)
        own = numel // len(RANKS)
        elements += numel - own if index in owned else own
    return elements * NS_DTYPE.itemsize


# %% [markdown]
# ## 5. Eight processes
#
# In each process, a job takes three steps with the same gradients, three times over: alone, with the
# whole matrices; by the short way; and by the long way. All of them must end with the same bits as the
# process alone.

# %%
STEPS = 3


def values_of(muon: Muon) -> list[tuple[Tensor, Tensor]]:
    """Each parameter and its momentum."""
    params = [p for group in muon.param_groups for p in group["params"]]
    return [(p.detach(), muon.state[p]["momentum_buffer"]) for p in params]


def report_of(mesh: DeviceMesh) -> dict[str, Any]:
    """The figures of one rank. ``differing`` has the matrices that are not bitwise equal."""
    rank = dist.get_rank()
    alone = trained(STEPS, None)
    with SentBytes() as sent:
        muon = trained(STEPS, mesh)
    long = LongWay(mesh)
    for step in range(1, STEPS + 1):
        long.step(step, alone.defaults)
    differing: dict[str, list[str]] = {"the short way": [], "the long way": []}
    for entry, wholes, shorts, *longs in zip(
        long.entries, values_of(alone), values_of(muon), long.params, long.momentum
    ):
        for whole, mine, run in zip(wholes, shorts, longs):
            if not torch.equal(mine.to_local(), shard_of(whole, entry.matrix, rank)):
                differing["the short way"].append(entry.matrix.name)
            if not torch.equal(run, long.shard(whole, entry)):
                differing["the long way"].append(entry.matrix.name)
    return {
        "differing": differing,
        "owned": muon.assignments[rank],
        "sent": sent.count // STEPS,
        "long calls": long.calls // STEPS,
        "long sent": long.sent // STEPS,
    }


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
# ## 6. The cost of both ways
#
# The bytes are those of the calls that the ranks made. The table leaves out the work after the
# optimizer. ZeRO-1 and FSDP2 must gather the changed weights before the next forward pass.


# %%
if __name__ == "__main__":
    print("\nA step by the short way\n\nrank  bytes sent   least  owns")
    for rank, report in enumerate(reports):
        names = " ".join(MATRICES[index].name for index in report["owned"])
        least = least_bytes(rank, report["owned"])
        print(f"{rank:4}  {report['sent']:10}{least:8}  {names}")
    owned = [len(report["owned"]) for report in reports]
    repeated = [report["long calls"] for report in reports]
    short_sent = sum(report["sent"] for report in reports)
    long_sent = sum(report["long sent"] for report in reports)
    print(f"\n{'a step':16}Newton-Schulz  busiest rank  bytes sent")
    print(f"{'the short way':16}{sum(owned):13}{max(owned):14}{short_sent:12}")
    print(f"{'the long way':16}{sum(repeated):13}{max(repeated):14}{long_sent:12}")

# %% [markdown]
# ## 7. The proof
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
def prove(reports: list[dict[str, Any]]) -> list[str]:
    """Prints the proof. Returns the facts that do not hold, in words."""
    problems = []
    print(f"\nThe proof: {STEPS} steps, {len(MATRICES)} matrices, {len(RANKS)} ranks")
    for way in reports[0]["differing"]:
        wrong = {name for report in reports for name in report["differing"][way]}
        print(f"  {way:20} bitwise equal: {'NO' if wrong else 'yes'}")
        problems += [f"{way}: {name} differs" for name in sorted(wrong)]
    for rank, report in enumerate(reports):
        if report["sent"] != least_bytes(rank, report["owned"]):
            problems.append(f"rank {rank}: sends {report['sent']} bytes")
    owned = sorted(index for report in reports for index in report["owned"])
    if owned != list(range(len(MATRICES))):
        problems.append(f"these matrices have an owner: {owned}")
    return problems


if __name__ == "__main__":
    if problems := prove(reports):
        raise RuntimeError("; ".join(problems))

# %% [markdown]
# ## 8. The blueprint's words and ours
#
# "There" is the [proof of concept][poc] that the blueprint explains and repairs.
#
# | there | here | difference |
# |---|---|---|
# | `dist_group`, `tp_group` | one group of all ranks that hold a matrix | There, pieces cross two groups in sequence. Here they cross one, which spans the grid. |
# | `param_groups`, `buffer_idx` (aisles) | the matrices that the same ranks hold | There, each parameter group has a buffer. Here a bucket takes matrices of several parameter groups. |
# | buckets, `bucket_idx` (pallets) | buckets | There, the order of the parameters fills a bucket. Here each owner has work in each bucket. |
# | `dist_meta` (master schedule) | a layout of each matrix | `dist_meta` has this rank's ranges. A layout has every rank's rectangles, and the ranks compare theirs. |
# | `global_buffer_size` (virtual buffer) | memory for each bucket in flight | There, a step makes room for all TP slices with padding. Here it makes room for some buckets, without padding. |
# | DP gather, TP gather | the gather of a bucket | There, all ranks get everything. Here the owner gets the shards that it lacks. |
# | run math | Newton-Schulz on the owner | There, each rank with a part of a matrix orthogonalizes all of it. |
# | TP shard, DP shard | the scatter of a bucket | There, each rank has the whole result and slices it. Here the owner sends the parts. |
# | ZeRO-1 | momentum is placed as its parameter | There, DP cuts momentum and the optimizer's copy of the weights. Here FSDP2 cuts both, and DDP neither. |
#
# [poc]: https://github.com/NVIDIA/Megatron-LM/pull/1428
#
# ## 9. The blueprint's bugs
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
