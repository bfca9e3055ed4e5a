"""The cost of a step, in words. A rank knows the schedules of its groups, so it asks no other rank."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn, Tensor

from .._newton_schulz import NS_DTYPE
from .._newton_schulz_variants import newton_schulz_bytes
from .._muon_engine.layouts import fsdp1, fsdp2
from .._muon_engine.layouts.layout import Layout, Ranks
from .._muon_engine.process_groups import counted, listed
from .._muon_engine.runtime.binder import PREPARED_BYTES
from .._muon_engine.schedule import packs
from .._muon_engine.schedule.order import RELAYS_IN_FLIGHT
from .._muon_engine.schedule.owners import flops_of
from .._muon_engine.schedule.packs import LocalPacks
from .._muon_engine.schedule.relays import relay_sizes
from .._muon_engine.schedule.schedule import Bucket, Schedule


# A group of more ranks shows only its busiest ranks and this one.
MOST_RANKS = 16
_BUSIEST_SHOWN = 3
# How many names a row of a table has.
_NAMES_IN_ROW = 3
_ROW = "  {:>6} {:>6} {:>8} {:>8} {:>11} {:>11} {:>11}  {}"
_FURTHER_COLUMNS = "x mean", "MiB sent", "received", "memory", ""

# The names and shapes of the tensors in a parameter: one, unless FSDP1 made the parameter of several.
Named = Sequence[tuple[Any, Sequence[int]]]


class RankBytes(NamedTuple):
    """The bytes that a rank sends and receives in a step, and has memory for."""

    sent: int
    received: int
    memory: int


def coverage(muon: Any, model: Any, others: Sequence[Any]) -> str:
    """How much Muon has, its share of ``model``, and the matrices that no optimizer has."""
    group_of: dict[Tensor, Any] = {}
    for group in muon.param_groups:
        group_of.update(dict.fromkeys(group["params"], group))
    trained: set[Tensor] = set(group_of)
    for optimizer in others:
        for group in optimizer.param_groups:
            trained.update(group["params"])
    gathered: dict[Tensor, fsdp2.Gathered] = {}
    if isinstance(model, nn.Module):
        gathered = fsdp2.gathered(model)
        of_model = _tensors_of(model, gathered)
    else:
        of_model = _listed_tensors(model or ())
    text = _share(group_of, of_model)
    text += _untrained(of_model, trained)
    return text + _unsharded(gathered, of_model, trained)


def _tensors_of(
    model: nn.Module, gathered: Mapping[Tensor, fsdp2.Gathered]
) -> dict[Tensor, Named]:
    """Parameter -> the tensors in it. The parameter is FSDP2's shard, whatever the model shows."""
    of_model: dict[Tensor, Named] = {}
    for _, param, tensors in fsdp1.logical_matrices(model):
        if fsdp2.is_shown(gathered, param):
            param = gathered[param].shard
        of_model[param] = tensors
    return of_model


def _listed_tensors(params: Iterable[Any]) -> dict[Tensor, Named]:
    """The same of a list of parameters, which may be pairs of a name and a parameter."""
    of_model: dict[Tensor, Named] = {}
    for entry in params:
        if type(entry) is tuple:
            name, param = entry
        else:
            name, param = tuple(entry.shape), entry
        of_model[param] = [(name, param.shape)]
    return of_model


def _share(group_of: Mapping[Tensor, Any], of_model: Mapping[Tensor, Named]) -> str:
    """The parameters in Muon's groups, and what part of the model they are."""
    split = flat = stacks = 0
    own_numel = 0
    for param, group in group_of.items():
        tensors = of_model.get(param, [("", param.shape)])
        own_numel += _numel(tensors)
        if group["split"]:
            split += 1
        if any(len(shape) > 2 for _, shape in tensors):
            if group["flatten"]:
                flat += 1
            else:
                stacks += 1
    text = f"Muon has {counted(len(group_of), 'parameter')} of {own_numel:,} elements: {split} split, {flat} flattened, {counted(stacks, 'stack')}"
    if not of_model:
        return text
    total = 0
    shared = 0
    for param, tensors in of_model.items():
        numel = _numel(tensors)
        total += numel
        if param in group_of:
            shared += numel
    part = shared / max(1, total)
    return text + f". That is {part:.1%} of the model's {total:,} elements"


def _numel(tensors: Named) -> int:
    return sum(math.prod(shape) for _, shape in tensors)


def _untrained(of_model: Mapping[Tensor, Named], trained: Collection[Tensor]) -> str:
    """The matrices of the model that no optimizer trains."""
    names: list[Any] = []
    for param, tensors in of_model.items():
        if param not in trained:
            names += [name for name, shape in tensors if len(shape) > 1]
    return f"\nNo optimizer given here has {listed(names)}" if names else ""


def _unsharded(
    gathered: Mapping[Tensor, fsdp2.Gathered],
    of_model: Mapping[Tensor, Named],
    trained: Collection[Tensor],
) -> str:
    """What FSDP2 has unsharded: at the moment, and when an optimizer was built. The latter is a mistake."""
    shown: list[Any] = []
    taken: list[Any] = []
    for tensor, of_unit in gathered.items():
        # Between to_empty() and the next forward, FSDP2 does not know the new shards.
        if of_unit.shard not in of_model:
            continue
        name, _ = of_model[of_unit.shard][0]
        if of_unit.is_shown:
            shown.append(name)
        if tensor in trained:
            taken.append(name)
    text = ""
    if shown:
        way = fsdp2.how_to_reshard(gathered.values())
        text += f"\nFSDP2 has unsharded {listed(shown)}. Before you build an optimizer, {way}"
    if taken:
        text += f"\nFSDP2 had unsharded {listed(taken)} when an optimizer was built. It never trains these: build it again"
    return text


def in_full(engine: Any) -> str:
    """The owners, the cost of a step, and the busiest ranks."""
    here = f"Muon on rank {engine.rank} of {engine.world_size}"
    count = counted(len(engine.params), "parameter")
    if engine.is_packed:
        lines = _schedule_in_full(engine, here, count)
    else:
        lines = [f"{here}: {count}, exchanged by the user's functions"]
        for rank, owned in engine.assignments.items():
            names = [engine.params[index].described for index in owned]
            lines.append(f"  rank {rank} owns {listed(names, _NAMES_IN_ROW)}")
    frozen = [param.described for param in engine.params if param.frozen]
    if frozen:
        lines.append(f"Frozen, and not in the schedule: {listed(frozen)}")
    return "\n".join(lines)


def _schedule_in_full(engine: Any, here: str, count: str) -> list[str]:
    """The lines about a step that moves shards itself. The first ones say what matters most. ``here`` names the rank, and
    ``count`` is the number of parameters in words.
    """
    schedule, prefetch_count = engine.schedule, engine.config.prefetch_count
    turns = "all owners at once"
    if schedule.one_owner_at_a_time:
        turns = "one owner at a time (debugging)"
    lines = [
        here + _share_of_rank(schedule, engine.rank),
        _memory(engine),
        f"{count}, {turns}, prefetch_count {prefetch_count}",
    ]
    names = _names_of_matrices(engine)
    for ranks in _groups_of(schedule.buckets):
        lines.append("")
        lines += table(schedule, ranks, engine.rank, prefetch_count, names)
    return lines


def in_a_line(engine: Any) -> str:
    """How many matrices an engine has, and its busiest owner."""
    schedule = engine.schedule
    every_matrix = range(len(schedule.layouts))
    work_of = _work_of_ranks(schedule.layouts, schedule.owners, every_matrix)
    busiest = max(work_of, key=lambda rank: work_of[rank])
    mean = work_of.total() / len(work_of) or 1
    matrices = counted(len(schedule.layouts), "matrix", "matrices")
    ranks = counted(len(work_of), "rank")
    buckets = counted(len(schedule.buckets), "bucket")
    return (
        f"{matrices} on {ranks}, in {buckets}. The busiest owner is rank {busiest}, with {work_of[busiest] / mean:.2f} times the "
        "mean work"
    )


def _share_of_rank(schedule: Schedule, rank: int) -> str:
    """How many of the matrices that it knows the ``rank`` owns, and who has most work."""
    matrices: list[int] = []
    for bucket in schedule.buckets:
        matrices += bucket.matrices
    if not matrices:
        return " has no matrices to train"
    work_of = _work_of_ranks(schedule.layouts, schedule.owners, matrices)
    own_count = sum(schedule.owners[matrix] == rank for matrix in matrices)
    all_matrices = counted(len(matrices), "matrix", "matrices")
    total = work_of.total() or 1
    busiest = max(work_of, key=lambda owner: work_of[owner])
    return (
        f" owns {own_count} of {all_matrices}, {work_of[rank] / total:.1%} of the work. The busiest owner is rank {busiest}, "
        f"with {work_of[busiest] * len(work_of) / total:.2f} times the mean work."
    )


def _work_of_ranks(
    layouts: Sequence[Layout], owners: Sequence[int], matrices: Sequence[int]
) -> Counter[int]:
    """The FLOPs of each rank that shares some of the ``matrices``, as their owner: 0 if it owns none."""
    work: Counter[int] = Counter()
    # Many matrices share one Shards, which may have thousands of holders.
    for shards in dict.fromkeys(layouts[matrix].shards for matrix in matrices):
        work.update(dict.fromkeys(shards.holders, 0))
    for matrix in matrices:
        work[owners[matrix]] += flops_of(layouts[matrix])
    return work


def _groups_of(buckets: Iterable[Bucket]) -> list[Ranks]:
    """The sets of ranks that share ``buckets``, each once, in the order of their first buckets."""
    return list(dict.fromkeys(bucket.ranks for bucket in buckets))


def _memory(engine: Any) -> str:
    """The memory of this rank, without parameters, gradients and momentum."""
    schedule, rank, config = engine.schedule, engine.rank, engine.config
    buckets = [bucket for bucket in schedule.buckets if rank in bucket.ranks]
    exchange = 0
    for ranks in _groups_of(buckets):
        exchange += bytes_of(schedule, ranks, rank, config.prefetch_count).memory
    workspace = _workspace(engine, buckets)
    kept = exchange if engine.device.type == "cpu" else 0
    return (
        f"Besides parameters, gradients and momentum, a step of this rank takes up to {_mib(exchange + workspace)} MiB: "
        f"{_mib(exchange)} for the exchange and {_mib(workspace)} for Newton-Schulz and updates. Between steps, the rank "
        f"keeps {_mib(kept)} MiB of it."
    )


def _workspace(engine: Any, buckets: Sequence[Bucket]) -> int:
    """The bytes of what Newton-Schulz needs at once, or of the whole matrices of a batch and of regions in their own
    dtype, if these are more.
    """
    schedule, rank = engine.schedule, engine.rank
    is_cpu = engine.device.type == "cpu"
    iterates = wholes = regions = 0
    for bucket in buckets:
        most_moved = _most_moved(schedule.packs(bucket, rank), rank)
        # Number of matrices in the last batch of each kind.
        batches: Counter[tuple] = Counter()
        for matrix in schedule.owned(bucket).get(rank, ()):
            layout = schedule.layouts[matrix]
            formulas = engine.params[layout.key.index].formulas
            batch = formulas.compute_key, layout.shape
            most = formulas.batch_size(layout.shape, engine.device)
            count = min(batches[batch] + 1, most)
            batches[batch] = count
            nbytes = newton_schulz_bytes(layout.shape, formulas.ns_algorithm, is_cpu)
            iterates = max(iterates, count * nbytes)
            wholes = max(wholes, count * layout.numel * NS_DTYPE.itemsize)
            most_moved = max(most_moved, count * layout.shards.numel_of(rank))
        dtypes = [schedule.layouts[matrix].dtype for matrix in bucket.matrices]
        itemsize = max(dtype.itemsize for dtype in dtypes)
        regions = max(regions, min(most_moved * itemsize, PREPARED_BYTES))
    return max(iterates, wholes + regions)


def _most_moved(local: LocalPacks, rank: int) -> int:
    """The most elements of a pack with shards of ``rank``."""
    moving = [local.gather_send, local.scatter_recv]
    moving += [relay.pack for relay in local.relays if relay.source != rank]
    return max(sum(pack.split_sizes) for pack in moving)


def _mib(size: int) -> str:
    return f"{size / 2**20:.4g}"


def _names_of_matrices(engine: Any) -> list[str]:
    """The name of each matrix: ``w[3][1]`` is part 1 of matrix 3 of a stack."""
    schedule = engine.schedule
    matrices_of_param = Counter(layout.key.index for layout in schedule.layouts)
    names: list[str] = []
    for layout in schedule.layouts:
        key = layout.key
        param = engine.params[key.index]
        split, flatten = param.form
        parts = max(1, len(split.sizes))
        # A rank may know only some matrices of a stack, and FSDP1 makes a vector of several.
        is_stack = param.tensor.ndim > 2 and not flatten
        numbers: list[int] = []
        if is_stack or matrices_of_param[key.index] > parts:
            numbers.append(key.sub // parts)
        if parts > 1:
            numbers.append(key.sub % parts)
        name = key._replace(sub=0).short
        name += "".join(f"[{number}]" for number in numbers)
        names.append(name)
    return names


def table(
    schedule: Schedule,
    ranks: Ranks,
    rank: int,
    prefetch_count: int,
    names: Sequence[str],
) -> list[str]:
    """One row per rank of a group. FLOPs are those of five quintic steps, which also decide the owners. ``names`` are those
    of the matrices.
    """
    buckets = [bucket for bucket in schedule.buckets if bucket.ranks == ranks]
    owned: dict[int, list[int]] = {owner: [] for owner in ranks}
    flops = dict.fromkeys(ranks, 0)
    matrices = heaviest = 0
    for bucket in buckets:
        for matrix in bucket.matrices:
            owner = schedule.owners[matrix]
            work = flops_of(schedule.layouts[matrix])
            owned[owner].append(matrix)
            flops[owner] += work
            heaviest = max(heaviest, work)
            matrices += 1
    mean = sum(flops.values()) / len(ranks) or 1
    # Ranks are in ascending order, and stay in it where they have the same work.
    busiest = sorted(ranks, key=lambda owner: -flops[owner])
    most = flops[busiest[0]]
    unit, flops_of_unit = ("TFLOP", 1e12) if most >= 1e11 else ("GFLOP", 1e9)
    lines = [
        f"{counted(len(ranks), 'rank')} ({listed(ranks)}), {counted(matrices, 'matrix', 'matrices')}, "
        f"{counted(len(buckets), 'bucket')}{_ways_of(buckets)}. Rank {busiest[0]} is the busiest, with {most / mean:.2f} times the "
        f"mean work. The largest matrix is {heaviest / mean:.2f} times the mean work.",
        _ROW.format("rank", "owns", unit, *_FURTHER_COLUMNS),
    ]
    shown = set(ranks)
    if len(ranks) > MOST_RANKS:
        shown = {rank, *busiest[:_BUSIEST_SHOWN]}
    for owner in sorted(shown):
        nbytes = bytes_of(schedule, ranks, owner, prefetch_count)
        row = _ROW.format(
            owner,
            len(owned[owner]),
            f"{flops[owner] / flops_of_unit:.3g}",
            f"{flops[owner] / mean:.2f}",
            _mib(nbytes.sent),
            _mib(nbytes.received),
            _mib(nbytes.memory),
            listed([names[matrix] for matrix in owned[owner]], _NAMES_IN_ROW),
        )
        lines.append(row.rstrip())
    hidden = len(ranks) - len(shown)
    if hidden:
        lines.append(f"  {hidden:,} other ranks are not shown")
    return lines


def _ways_of(buckets: Sequence[Bucket]) -> str:
    """How shards are exchanged, if it is not directly."""
    ways = ""
    if any(bucket.relayed for bucket in buckets):
        ways += ", relayed along replicas"
    return ways


def bytes_of(
    schedule: Schedule, ranks: Ranks, rank: int, prefetch_count: int
) -> RankBytes:
    """The bytes of ``rank`` for the buckets of ``ranks``, of which ``prefetch_count`` are prefetched."""
    sent = received = 0
    packs_of_buckets: list[LocalPacks] = []
    for bucket in schedule.buckets:
        if bucket.ranks != ranks:
            continue
        local = schedule.packs(bucket, rank)
        packs_of_buckets.append(local)
        sent += local.gather_send.nbytes + local.scatter_send.nbytes
        received += local.gather_recv.nbytes + local.scatter_recv.nbytes
        for relay in local.relays:
            if relay.source == rank:
                sent += relay.pack.nbytes
            else:
                received += relay.pack.nbytes
    relays = relay_sizes((local.relays for local in packs_of_buckets), rank)
    slots = packs.slots_for(prefetch_count)
    memory = 0
    for slot in packs.slot_sizes(packs_of_buckets, slots):
        memory += slot.as_holder + slot.as_owner
    memory += relays.sent + RELAYS_IN_FLIGHT * relays.received
    return RankBytes(sent, received, memory)
