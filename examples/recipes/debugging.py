"""What to look at when something is wrong, or before a long run."""

import contextlib
import copy
import faulthandler
import itertools
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from gradients import average
from models import batches, cut_linears, MLP, Transformer
from one_process import OneProcess, same_bits
from place import device
from runner import check, recipe, Wrong
from tensor_parallel import parallelize
from torch import nn, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)


class Lines(logging.Handler):
    """Keeps what is logged; ``logging.basicConfig`` would print it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextlib.contextmanager
def kept(name: str) -> Iterator[list[str]]:
    """All lines of a logger, which nobody else gets meanwhile."""
    log, lines = logging.getLogger(name), Lines()
    level, propagate = log.level, log.propagate
    log.addHandler(lines)
    log.setLevel(logging.DEBUG)
    log.propagate = False  # torch has a handler that prints
    try:
        yield lines.found
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
        log.propagate = propagate


@recipe(processes=4)
def debug_mode() -> tuple[OneProcess, str]:
    """One owner after the other, and a line for each parameter and phase."""
    model = FSDP(Transformer(), device_id=device(), use_orig_params=True)
    config = create_auto_config(fsdp_process_group=dist.group.WORLD, module=model)
    config.async_gpu_parallelism = False
    config.prefetch_count = 0
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)

    one = Transformer().to(device())
    alone = OneProcess(one, model, optimizer, fsdp=model.process_group)
    with kept("torch.optim.muon") as lines:
        for inputs, targets in batches(dist.group.WORLD):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    # "rank 1: gather parameter 3 ..., owner 2"
    owners = [
        int(re.search(r"gather .* owner (\d+)$", line)[1])
        for line in lines
        if ": gather " in line
    ]
    per_step = owners[: len(owners) // alone.steps]
    check(bool(owners) and per_step == sorted(per_step), f"owners took turns: {owners}")
    return alone, f"{len(lines)} lines on rank 0, owners in rank order"


def describe_groups(**groups: ProcessGroup) -> list[str]:
    """What this rank's groups are, and what is wrong with them as dimensions of a grid."""
    rank, lines = dist.get_rank(), []
    members = {}
    for kind, group in groups.items():
        members[kind] = dist.get_process_group_ranks(group)
        lines.append(
            f"rank {rank} is {dist.get_rank(group)} of {dist.get_world_size(group)} in "
            f"{kind}, ranks {members[kind]}"
        )
    for (a, ours), (b, theirs) in itertools.combinations(members.items(), 2):
        shared = sorted(set(ours) & set(theirs))
        check(shared == [rank], f"rank {rank}: ranks {shared} are in both {a} and {b}")
    # A group that each rank made of a list of its own shows in that the others see another.
    for kind, group in groups.items():
        seen = [None] * dist.get_world_size(group)
        dist.all_gather_object(seen, members[kind], group=group)
        check(
            seen == [members[kind]] * len(seen), f"{kind}, as its ranks see it: {seen}"
        )
    return lines


@recipe(processes=4)
def process_groups() -> str:
    """Before anything else: which ranks are in which group."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_all_groups()
    lines = describe_groups(TP=tp_pg, FSDP=fsdp_pg)
    found = ""
    try:
        describe_groups(TP=tp_pg, replicate=tp_pg)  # one pair cannot be both
    except Wrong as error:
        found = str(error)
    check("are in both TP and replicate" in found, "two equal groups pass for a grid")
    return "; ".join(lines)


def is_identity(param: Tensor, index: int, config: DistributedConfig) -> bool:
    """Whether gather and redistribute give back, outside of ``step()``, what they got."""
    piece = param.detach().clone()
    config.state["current_param_idx"] = index
    whole = config.gather_fn(piece, dist.get_rank(), config.state)
    again = config.redistribute_fn(whole, dist.get_rank(), config.state)
    del config.state["current_param_idx"]
    if isinstance(piece, DTensor):
        if again.placements != piece.placements:
            return False
        again, piece = again.to_local(), piece.to_local()
    return same_bits(again, piece)


@recipe(processes=4)
def round_trip() -> str:
    """``gather_fn`` and then ``redistribute_fn`` change nothing."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp_pg, tp_pg = mesh.get_all_groups()
    dtensors = fully_shard(
        parallelize(Transformer().to(device()), mesh["tp"]), mesh=mesh["fsdp"]
    )
    by_hand = cut_linears(Transformer().to(device()), tp_pg, fsdp=fsdp_pg)
    tp_dims = dict(enumerate([0, 1, 0, 1, 0, 1, 0, 1]))
    configs = {
        dtensors: create_dtensor_config(),
        by_hand: create_auto_config(
            fsdp_process_group=fsdp_pg, tp_process_group=tp_pg, tp_dim_per_param=tp_dims
        ),
    }
    for model, config in configs.items():
        # All ranks, for the same parameters in the same order: this communicates.
        for index, param in enumerate(model.parameters()):
            check(is_identity(param, index, config), f"parameter {index} has changed")
    return f"{len(tp_dims)} DTensors and {len(tp_dims)} plain pieces came back bitwise"


@torch.no_grad()
def compare_params(
    some: Iterable[Tensor], others: Iterable[Tensor], atol: float = 0.0
) -> bool:
    """Whether they are as many, of the same shapes, and to ``atol`` the same everywhere."""
    pairs = list(itertools.zip_longest(some, others))
    if any(a is None or b is None or a.shape != b.shape for a, b in pairs):
        return False
    return all(torch.allclose(a, b, rtol=0.0, atol=atol) for a, b in pairs)


@recipe(processes=4)
def comparison() -> str:
    """One step of FSDP beside one of a single process, from the same start."""
    single = MLP().to(device())
    # A second model made after the same seed would begin with other random numbers.
    sharded = FSDP(copy.deepcopy(single), device_id=device())
    optimizer_single = Muon(single.parameters(), lr=1e-3)
    config = create_auto_config(fsdp_process_group=dist.group.WORLD)
    optimizer = Muon(sharded.parameters(), lr=1e-3, distributed_config=config)

    # The same batch on all ranks: the average of equal gradients is each of them.
    for inputs, targets in batches():
        for model, its in ((single, optimizer_single), (sharded, optimizer)):
            its.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            its.step()
        with FSDP.summon_full_params(sharded, writeback=False):
            pairs = list(single.parameters()), list(sharded.module.parameters())
            check(compare_params(*pairs, atol=1e-5), "they have come apart")
            is_exact = compare_params(*pairs)
    return f"FSDP and one process agree {'to the last bit' if is_exact else 'to 1e-5'}"


@recipe(processes=4)
def profile() -> str:
    """What a step does, and how often: exchanges between ranks, products of matrices."""
    model = fully_shard(Transformer().to(device()))
    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)
    inputs, targets = next(batches(dist.group.WORLD))
    F.mse_loss(model(inputs), targets).backward()
    optimizer.step()  # the first one makes buffers

    steps = 3
    with torch.profiler.profile(acc_events=True) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function("muon step"):
                optimizer.step()
    events = {event.key: event for event in profiler.key_averages()}
    mine = len(optimizer.assignments[dist.get_rank()])
    exchanges = events["c10d::alltoall_base_"].count // steps
    products = events["aten::mm"].count // steps
    # There and back for a bucket of many matrices, and one X @ X.T for each iteration.
    check(exchanges < len(list(model.parameters())), f"{exchanges} exchanges")
    check(products == 5 * mine, f"{products} products for {mine} matrices")
    milliseconds = events["muon step"].cpu_time / 1000
    return (
        f"a step: {exchanges} exchanges for all matrices, {mine} orthogonalized on rank "
        f"{dist.get_rank()}, {milliseconds:.0f} ms under the profiler"
    )


class Stuck(Exception):
    """A step that did not come back, with the ranks that did not come to it."""


@contextlib.contextmanager
def watched(store: dist.Store, group: ProcessGroup, patience: float) -> Iterator[None]:
    """Tells of a step that fails since not all of ``group`` make it: who is missing, and
    where this rank waited.

    The group's own timeout ends the waiting. A signal's handler would not run before: Python
    calls it between its own instructions, and this one waits in the backend's code.
    """
    ranks = dist.get_process_group_ranks(group)
    store.set(f"in step: {dist.get_rank()}", "")
    with tempfile.TemporaryFile("w+") as trace:
        # From a thread of its own, which needs no answer of the waiting one.
        faulthandler.dump_traceback_later(patience, file=trace)
        try:
            yield
        except RuntimeError as error:
            missing = [r for r in ranks if not store.check([f"in step: {r}"])]
            trace.seek(0)
            # The main thread comes last.
            main = trace.read().rpartition("(most recent call first)")[2]
            where = re.search(r'File ".*?(\w+\.py)", line (\d+) in (\w+)', main)
            place = "{}:{} in {}".format(*where.groups()) if where else "nowhere long"
            raise Stuck(f"ranks {missing} are missing; waited at {place}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()


@recipe(processes=4)
def hang() -> str:
    """A rank leaves out a step. The others say which, and where they have waited."""
    # Of these, not of the default half an hour. Some backends cannot go on after it.
    ddp_pg = dist.new_group(timeout=timedelta(seconds=5))
    store = shared_store()
    model = MLP().to(device())
    config = create_auto_config(ddp_process_group=ddp_pg)
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)
    inputs, targets = next(batches())
    F.mse_loss(model(inputs), targets).backward()
    dist.barrier()

    said = ""
    if dist.get_rank() != 3:
        try:
            with watched(store, ddp_pg, patience=2.0):
                optimizer.step()
        except Stuck as stuck:
            said = str(stuck)
        check("ranks [3]" in said and "statuses.py" in said, f"it says: {said!r}")
    dist.barrier()  # keeps the store, which rank 0 serves, until all are done
    return said


def shared_store() -> dist.Store:
    """One that all ranks can write to, whatever became of their process groups."""
    first = dist.get_rank() == 0
    store = dist.TCPStore("localhost", 0, is_master=True) if first else None
    port = [store.port if first else None]
    dist.broadcast_object_list(port, src=0)
    return store or dist.TCPStore("localhost", port[0], is_master=False)


@recipe(processes=4)
def detailed_checks() -> tuple[OneProcess, str]:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL compares collectives before it runs them."""
    # Read when torch is imported and by this call; counts for groups that are made then.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    ddp_pg = dist.new_group()
    del os.environ["TORCH_DISTRIBUTED_DEBUG"]
    dist.set_debug_level_from_env()

    model = MLP().to(device())
    config = create_auto_config(ddp_process_group=ddp_pg)
    optimizer = Muon(model.parameters(), lr=1e-3, distributed_config=config)
    alone = OneProcess(MLP().to(device()), model, optimizer)
    for inputs, targets in batches(ddp_pg):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        average(model.parameters(), ddp_pg, ddp_pg.size())
        optimizer.step()
    try:
        # Where it is off, this hangs or gives garbage.
        dist.all_reduce(
            torch.zeros(4 + (dist.get_rank() == 3), device=device()), group=ddp_pg
        )
    except RuntimeError as error:
        named = re.search(r"Rank \d+ is running.*?Rank \d+ is running", str(error))
        check(named is not None, f"the error names no ranks: {error}")
        return alone, "a wrong collective is an error that names the ranks"
    raise RuntimeError("a wrong collective passed")


def check_assignments(assignments: dict[int, list[int]], count: int) -> None:
    """Raises where an index has no owner, or several."""
    owned = sorted(itertools.chain.from_iterable(assignments.values()))
    check(owned == list(range(count)), f"assignments of {count} indices: {assignments}")


@recipe(processes=4)
def assignments() -> tuple[OneProcess, str]:
    """Who orthogonalizes what, and a few steps on trial."""
    model = fully_shard(Transformer().to(device()))
    config = create_dtensor_config()
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)

    check_assignments(optimizer.assignments, len(list(model.parameters())))
    mine = optimizer.assignments.get(optimizer.current_rank, [])
    alone = OneProcess(Transformer().to(device()), model, optimizer)
    for step, (inputs, targets) in enumerate(batches(dist.group.WORLD)):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finite = all(p.to_local().isfinite().all() for p in model.parameters())
        check(finite, f"step {step} leaves numbers that are none")
    return (
        alone,
        f"rank {optimizer.current_rank} owns {mine} of {optimizer.assignments}",
    )


def create_simple_model(hidden_size: int = 64, num_layers: int = 2) -> nn.Sequential:
    """Square layers with ReLU between them. Biases are not for Muon, so there are none."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(hidden_size, hidden_size, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def sync_model_params(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Gives all ranks what the first has, buffers included. For plain tensors."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor, group=group, group_src=0)


@recipe(processes=4)
def helpers() -> tuple[OneProcess, str]:
    """A small model, the same on all ranks."""
    torch.manual_seed(dist.get_rank())
    model = create_simple_model(hidden_size=32).to(device())
    first = [torch.zeros_like(p) for p in model.parameters()]
    for tensor, param in zip(first, model.parameters()):
        tensor.copy_(param.detach())
        dist.broadcast(tensor, src=0)
    differed = not compare_params(first, model.parameters())
    sync_model_params(model)
    check(compare_params(first, model.parameters()), "not synchronized")
    check(differed == (dist.get_rank() != 0), "they did not differ before")

    config = create_auto_config(ddp_process_group=dist.group.WORLD)
    one = copy.deepcopy(model)
    optimizer = Muon(model.parameters(), lr=0.01, distributed_config=config)
    alone = OneProcess(one, model, optimizer)
    for inputs, targets in batches(dist.group.WORLD):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        average(model.parameters(), dist.group.WORLD, dist.get_world_size())
        optimizer.step()
    return alone, "synchronized from rank 0"
