"""``scale``: what a step costs on many ranks, from the plan that the engine would make there.

DTensors without data say where the shards are, on a mesh of any size. The operations of the busiest owner are played in their
order: work over FLOP/s, bytes over bytes/s. A bucket takes as long as the busiest of its owners. Muon has its default options.
The sum leaves out launches, congestion, and that transfers slow down computation.
"""

import itertools
import json
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import _muon_reports
from torch.optim._muon_engine.dtensors import Layouts, matrices_of_dtensor
from torch.optim._muon_engine.plan import (
    assign_owners,
    Bucket,
    make_plan,
    numel_of,
    Phase,
    Plan,
    ROUNDS_IN_FLIGHT,
)
from torch.optim._muon_engine.params import Matrix, Param
from torch.optim._newton_schulz import NS_DTYPE
from torch.optim.muon import partition_named_parameters

from .engine_view import default_formulas
from .models import Model, MODELS
from .table import render


class GPU(NamedTuple):
    """A GPU and its links; FLOP/s, bytes/s and seconds, bandwidths in one direction.

    Compute: H100 SXM, 989e12 dense bfloat16 FLOP/s (NVIDIA's data sheet), of which Newton-Schulz got ``utilization`` on an
    H100, and copies ``memory_bandwidth`` (docs/data/h100-gpu.md). ``training_utilization`` is of forward and backward.
    Inside a node: NVLink, 900e9 bytes/s in both directions together (same data sheet).
    Between nodes: one 400 Gb/s InfiniBand adapter for each GPU (NVIDIA's DGX H100 data sheet).
    Latencies: those of NCCL's own model (src/graph/tuning.cc) for a hop of a ring of small messages.
    """

    peak_flops: float = 989e12
    utilization: float = 0.58
    training_utilization: float = 0.4
    memory_bandwidth: float = 3.0e12
    intra_bandwidth: float = 450e9
    inter_bandwidth: float = 50e9
    intra_latency: float = 0.47e-6
    inter_latency: float = 2.7e-6
    gpus_per_node: int = 8

    @property
    def flops(self) -> float:
        return self.peak_flops * self.utilization


# A100: half of the NVLink, and adapters of 200 Gb/s (NVIDIA's data sheets of A100 and DGX A100). Its memory has 2039e9
# bytes/s there, of which copies are assumed to get as much as on an H100.
GPUS = {
    "h100": GPU(),
    "a100": GPU(
        peak_flops=312e12,
        memory_bandwidth=1.8e12,
        intra_bandwidth=300e9,
        inter_bandwidth=25e9,
    ),
}


def gpu_of(settings: Iterable[str]) -> GPU:
    """The GPU of a name or of a ``gpu.json``, with values that are written as ``name=value``."""
    gpu = GPU()
    for setting in settings:
        name, _, value = setting.partition("=")
        if value:
            gpu = gpu._replace(**{name: float(value)})
        elif name in GPUS:
            gpu = GPUS[name]
        else:
            measured = json.loads(Path(name).read_text())
            gpu = gpu._replace(**measured["hardware"])
    return gpu


def model_of(name: str, active: int) -> Model:
    """A public model, or that of a function, written ``module:function``, which makes a module."""
    if name in MODELS:
        return MODELS[name]
    make_module = resolve_name(name)
    with torch.device("meta"):
        module = make_module()
    matrices, _ = partition_named_parameters(module, allow_batched_matrices=True)
    shapes = [tuple(param.shape) for _, param in matrices]
    if any(len(shape) > 2 for shape in shapes) and not active:
        raise ValueError("--active-experts K: how many experts does a token use?")
    return Model(shapes, active)


class Case(NamedTuple):
    """A model in one of ``LAYOUTS`` over ``outer`` x ``inner`` ranks, of which ``inner`` are neighbours. FSDP cuts stacks of
    experts along ``shard_dim``.
    """

    model: Model
    layout: str
    outer: int
    inner: int = 1
    shard_dim: int = 0

    @property
    def world(self) -> int:
        return self.outer * self.inner


LAYOUTS = "fsdp", "hsdp", "ddp", "fsdp-tp", "fsdp-ep"


def matrices_of(case: Case) -> list[Matrix]:
    """The matrices of all ranks."""
    ranks = torch.arange(case.world).view(case.outer, case.inner)
    square = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
    flat = DeviceMesh("cpu", ranks.flatten(), _init_backend=False, _rank=0)
    layouts: Layouts = {}
    formulas = default_formulas()
    matrices: list[Matrix] = []
    for index, shape in enumerate(case.model.shapes):
        is_stack = len(shape) > 2
        placements = _placements(case, index, is_stack)
        mesh = flat if len(placements) == 1 else square
        param = _distributed(shape, mesh, tuple(placements))
        of_model = Param(index, param, formulas=formulas)
        matrices += matrices_of_dtensor(of_model, layouts, for_whole_mesh=True)
    return matrices


@cache
def _distributed(shape: tuple[int, ...], mesh: DeviceMesh, placements: Any) -> DTensor:
    whole = torch.empty(shape, device="meta")
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _placements(case: Case, index: int, is_stack: bool) -> list[Any]:
    """Those of a parameter on the mesh of one or two dimensions."""
    first = 1 if is_stack else 0
    sharded = Shard(case.shard_dim * first)
    if case.layout == "ddp":
        return [Replicate()]
    if case.layout == "hsdp":
        return [Replicate(), sharded]
    if case.layout == "fsdp-ep" and is_stack:
        return [Shard(1), Shard(0)]
    if case.layout == "fsdp-tp":
        # Column- and row-parallel in turn. FSDP cuts what TP has cut.
        by_tp = Shard(first + index % 2)
        if by_tp == sharded:
            return [_StridedShard(by_tp.dim, split_factor=case.inner), by_tp]
        return [sharded, by_tp]
    return [sharded]


# Elements by peer.
Sizes = list[tuple[int, int]]


class Step:
    """A step of ``rank`` by its ``plan``, and when it is done: ``now``."""

    def __init__(self, plan: Plan, rank: int, gpu: GPU) -> None:
        self.plan, self.rank, self.gpu = plan, rank, gpu
        self.now = 0.0
        # When the link is free, and when the last transfer of each bucket is over.
        self.link_is_free = 0.0
        self.arrives: dict[int, float] = {}
        self.received = 0
        self.owners = plan.owners
        for phase, index in plan.operations:
            self.play(phase, index, plan.buckets[index])

    def play(self, phase: Phase, index: int, bucket: Bucket) -> None:
        """torch's functions make several passes, with 12 bytes for an element of momentum, 18 for one to orthogonalize, 26 for
        one to update, and 4 for a copy.
        """
        layouts = [matrix.layout for matrix in bucket.matrices]
        held = sum(layout.numel_of(self.rank) for layout in layouts)
        blended = numel_of(bucket.held)
        others = list(zip(bucket.row, bucket.send_sizes))
        own = list(zip(bucket.row, bucket.receive_sizes))
        rounds: list[Sizes] = []
        for of_round in bucket.rounds:
            rounds.append(list(zip(bucket.column, of_round.sizes)))
        if phase is Phase.GATHER:
            self.pass_over(12 * held + 18 * blended)
            self.transfer(index, own, others)
            return
        self.now = max(self.now, self.arrives[index])
        if phase is Phase.COMPUTE:
            # To the matrices, and back.
            assembled = sum(matrix.numel for matrix in bucket.owned)
            self.pass_over(2 * 4 * assembled)
            self.now += self.busiest_seconds(bucket)
            self.transfer(index, others, own)
        if phase is Phase.APPLY:
            for sizes in rounds[ROUNDS_IN_FLIGHT:]:
                self.transfer(index, sizes)
            self.now = max(self.now, self.arrives[index])
            self.pass_over(26 * held)
        elif phase is Phase.FORWARD or len(bucket.row) == 1:
            for sizes in rounds[:ROUNDS_IN_FLIGHT]:
                self.transfer(index, sizes)

    def pass_over(self, nbytes: int) -> None:
        self.now += nbytes / self.gpu.memory_bandwidth

    def busiest_seconds(self, bucket: Bucket) -> float:
        work: Counter[int] = Counter()
        for matrix in bucket.matrices:
            work[self.owners[matrix]] += matrix.flops
        return max(work.values()) / self.gpu.flops

    def transfer(self, index: int, inward: Sizes, outward: Sizes = ()) -> None:
        """Moves elements of a bucket when the link is free."""
        seconds = max(self.link_seconds(inward), self.link_seconds(outward))
        self.arrives.setdefault(index, self.now)
        if seconds:
            self.link_is_free = max(self.now, self.link_is_free) + seconds
            self.arrives[index] = self.link_is_free
        elements = sum(size for peer, size in inward if peer != self.rank)
        self.received += elements * NS_DTYPE.itemsize

    def link_seconds(self, sizes: Sizes) -> float:
        """How long the links to GPUs in this node and in others take."""
        gpu = self.gpu
        near = far = 0.0
        for peer, size in sizes:
            if not size or peer == self.rank:
                continue
            nbytes = size * NS_DTYPE.itemsize
            if peer // gpu.gpus_per_node == self.rank // gpu.gpus_per_node:
                near += nbytes / gpu.intra_bandwidth + gpu.intra_latency
            else:
                far += nbytes / gpu.inter_bandwidth + gpu.inter_latency
        return max(near, far)


COLUMNS = (
    "of the busiest owner",
    "ranks",
    "work / mean",
    "step, ms",
    "Newton-Schulz, ms",
    "of a training step",
    "receives, GB",
    "memory, GB",
)


def row_of(name: str, case: Case, gpu: GPU, prefetch: int = 1) -> list[str]:
    """The costs of the rank with the most work."""
    owners = assign_owners(matrices_of(case))
    work: Counter[int] = Counter()
    for matrix, owner in owners.items():
        work[owner] += matrix.flops
    ((rank, most),) = work.most_common(1)
    is_flat = case.layout in ("fsdp", "ddp")
    mesh = f"{case.world}" if is_flat else f"{case.outer} x {case.inner}"
    plan = make_plan(owners, rank, prefetch)
    step = Step(plan, rank, gpu)
    flops = 6 * case.model.active_numel * case.model.tokens / case.world
    rest = flops / (gpu.peak_flops * gpu.training_utilization)
    return [
        f"{name}, {case.layout}",
        mesh,
        f"{most * case.world / work.total():.2f}",
        f"{1e3 * step.now:.1f}",
        f"{1e3 * most / gpu.flops:.1f}",
        f"{step.now / (step.now + rest):.2%}",
        f"{step.received / 1e9:.2f}",
        f"{memory_of(plan, rank) / 1e9:.2f}",
    ]


def memory_of(plan: Plan, rank: int) -> int:
    """The bytes that ``Muon.describe()`` counts."""
    engine = SimpleNamespace(plan=plan, rank=rank, device=torch.device("cuda"))
    return _muon_reports._memory(engine)


def run(args: Namespace) -> Iterator[str]:
    gpu = gpu_of(args.gpu)
    rows = []
    for name in args.model:
        model = model_of(name, args.active_experts)
        if args.tokens:
            model = model._replace(tokens=args.tokens)
        yield f"{name}: {model.summary}"
        for ranks, layout in itertools.product(args.ranks, args.layouts):
            if ranks % args.inner:
                raise ValueError(f"--inner {args.inner} does not divide {ranks} ranks")
            outer = ranks // args.inner
            case = Case(model, layout, outer, args.inner, args.shard_dim)
            if layout != "fsdp-ep" or model.active:
                rows.append(row_of(name, case, gpu, args.prefetch))
    yield render(COLUMNS, rows)
