"""The cost of a step, in words. A rank knows the schedules of its groups, so it asks no other rank."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn, Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .._newton_schulz import NS_DTYPE
from .._newton_schulz_variants import newton_schulz_bytes
from .._muon_engine.layouts import fsdp1, fsdp2
from .._muon_engine.layouts.layout import Ranks
from .._muon_engine.process_groups import listed, ranks_per_node
from .._muon_engine.runtime.binder import PREPARED_BYTES
from .._muon_engine.schedule import packs
from .._muon_engine.schedule.division import best_division, Class
from .._muon_engine.schedule.levels import passed_on
from .._muon_engine.schedule.owners import flops_of
from .._muon_engine.schedule.relays import relay_sizes
from .._muon_engine.schedule.order import RELAYS_IN_FLIGHT
from .._muon_engine.schedule.schedule import Schedule


# A group of more ranks shows only its busiest ranks and this one.
MOST_RANKS = 16
_ROW = "  {:>6} {:>6} {:>8} {:>8} {:>11} {:>11} {:>11}  {}"
_HEADER = "rank", "owns", "TFLOP", "x mean", "MiB sent", "received", "memory", ""


def coverage(muon: Any, model: Any, others: Sequence[Any]) -> str:
    """How much Muon has, its share of ``model``, and the matrices that no optimizer has."""
    group_of = {p: group for group in muon.param_groups for p in group["params"]}
    of_model: dict[Tensor, Any] = {}
    gathered: dict[Tensor, fsdp2.Gathered] = {}
    if isinstance(model, nn.Module):
        gathered = fsdp2.gathered(model)
        for _, param, tensors in fsdp1.logical_matrices(model):
            is_shown = fsdp2.is_shown(gathered, param)
            of_model[gathered[param].shard if is_shown else param] = tensors
    else:
        pairs = [e if type(e) is tuple else (tuple(e.shape), e) for e in model or ()]
        of_model = {p: [(name, p.shape)] for name, p in pairs}
    inside: dict[Tensor, Any] = {p: [("", p.shape)] for p in group_of} | of_model
    numel = {p: sum(math.prod(s) for _, s in inside[p]) for p in inside}
    deep = [p for p in group_of if any(len(shape) > 2 for _, shape in inside[p])]
    flat = sum(bool(group_of[p]["flatten"]) for p in deep)
    split = sum(bool(group["split"]) for group in group_of.values())
    own = sum(numel[p] for p in group_of)
    text = f"Muon has {len(group_of)} parameters of {own:,} elements: {split} split, {flat} flattened, {len(deep) - flat} stacks"
    if of_model:
        total = sum(numel[p] for p in of_model)
        part = sum(numel[p] for p in of_model if p in group_of) / max(1, total)
        text += f". That is {part:.1%} of the model's {total:,} elements"
    trained = {p for o in (muon, *others) for g in o.param_groups for p in g["params"]}
    left = [t for p, tensors in of_model.items() if p not in trained for t in tensors]
    names = [name for name, shape in left if len(shape) > 1]
    if names:
        text += f"\nNo optimizer given here has {listed(names)}"
    return text + _unsharded(gathered, of_model, trained)


def _unsharded(
    gathered: Mapping[Tensor, fsdp2.Gathered],
    of_model: Mapping[Tensor, Any],
    trained: Collection[Tensor],
) -> str:
    """What FSDP2 has unsharded: at the moment, and when an optimizer was built. The latter is a mistake."""
    names = {
        tensor: of_model[of.shard][0][0]
        for tensor, of in gathered.items()
        # Between to_empty() and the next forward, FSDP2 does not know the new shards.
        if of.shard in of_model
    }
    shown = [name for tensor, name in names.items() if gathered[tensor].is_shown]
    taken = [name for tensor, name in names.items() if tensor in trained]
    text = ""
    if shown:
        way = fsdp2.how_to_reshard(gathered.values())
        text += f"\nFSDP2 has unsharded {listed(shown)}. Before you build an optimizer, {way}"
    if taken:
        text += f"\nFSDP2 had unsharded {listed(taken)} when an optimizer was built. It never trains these: build it again"
    return text


def in_full(engine: Any) -> str:
    """The owners, the cost of a step, and the busiest ranks."""
    count, schedule = len(engine.params), engine.schedule
    first = f"Muon on rank {engine.rank} of {engine.world_size}, {count} parameters, "
    if not engine.is_packed:
        lines = [first + "exchanged by the user's functions"]
        for rank, owned in engine.assignments.items():
            names = [engine.params[i].described for i in owned]
            lines.append(f"  rank {rank} owns {listed(names, 3)}")
    else:
        serial, ahead = schedule.one_owner_at_a_time, engine.config.prefetch_count
        turns = "one owner at a time (debugging)" if serial else "all owners at once"
        lines = [f"{first}{turns}, prefetch_count {ahead}", _memory(engine)]
        for ranks in dict.fromkeys(bucket.ranks for bucket in schedule.buckets):
            table = _table(schedule, ranks, engine.rank, ahead)
            lines += ["", *table, *_division(engine, ranks)]
    frozen = [param.described for param in engine.params if param.frozen]
    if frozen:
        lines.append(f"Frozen, and not in the schedule: {listed(frozen)}")
    return "\n".join(lines)


def _memory(engine: Any) -> str:
    """The memory of this rank, without parameters, gradients and momentum."""
    schedule, rank, ahead = engine.schedule, engine.rank, engine.config.prefetch_count
    buckets = [bucket for bucket in schedule.buckets if rank in bucket.ranks]
    sharing = {bucket.ranks for bucket in buckets}
    exchange = sum(bytes_of(schedule, ranks, rank, ahead)[2] for ranks in sharing)
    # What Newton-Schulz needs at once, the whole matrices of a batch, and regions in their own dtype.
    iterates = wholes = regions = 0
    for bucket in buckets:
        local = schedule.packs(bucket, rank)
        moving = [relay.pack for relay in local.relays if relay.source != rank]
        moving += [local.gather_send, local.scatter_recv]
        moved = [sum(pack.split_sizes) for pack in moving]
        itemsize = max(schedule.layouts[m].dtype.itemsize for m in bucket.matrices)
        batches: Counter[tuple] = Counter()
        for m in schedule.owned(bucket).get(rank, ()):
            layout = schedule.layouts[m]
            formulas = engine.params[layout.key.index].formulas
            batch = formulas.compute_key, layout.shape
            most = formulas.batch_size(layout.shape, engine.device)
            count = batches[batch] = min(batches[batch] + 1, most)
            algorithm, blocks = formulas.ns_algorithm, layout.key.block[1]
            is_cpu = engine.device.type == "cpu"
            nbytes = newton_schulz_bytes(layout.full_shape, algorithm, blocks, is_cpu)
            iterates = max(iterates, count * nbytes)
            wholes = max(wholes, count * layout.numel * NS_DTYPE.itemsize)
            moved.append(count * layout.shards.numel_of(rank))
        regions = max(regions, min(max(moved) * itemsize, PREPARED_BYTES))
    workspace = max(iterates, wholes + regions)
    keeps = engine.config.state.get("keep_buffers", False)
    is_kept = keeps or engine.device.type == "cpu"
    return (
        f"Besides parameters, gradients and momentum, a step of this rank takes up to {_mib(exchange + workspace)} MiB: "
        f"{_mib(exchange)} for the exchange and {_mib(workspace)} for Newton-Schulz and updates. Between steps, the rank "
        f"keeps {_mib(exchange * is_kept)} MiB of it."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.4g}"


def _table(schedule: Schedule, ranks: Ranks, rank: int, ahead: int) -> list[str]:
    """One row per rank. FLOPs are those of five quintic steps, which also decide the owners."""
    buckets = [bucket for bucket in schedule.buckets if bucket.ranks == ranks]
    owned: dict[int, list[int]] = {r: [] for r in ranks}
    for matrix in (matrix for bucket in buckets for matrix in bucket.matrices):
        owned[schedule.owners[matrix]].append(matrix)
    flops = [flops_of(layout) for layout in schedule.layouts]
    loads = {r: sum(flops[m] for m in matrices) for r, matrices in owned.items()}
    mean = sum(loads.values()) / len(ranks) or 1
    busiest = sorted(ranks, key=lambda r: (-loads[r], r))
    heaviest = max(flops[m] for matrices in owned.values() for m in matrices)
    ways = ", relayed along replicas" * any(b.relayed for b in buckets)
    ways += ", in two levels" * any(b.node_size > 1 for b in buckets)
    shown = {rank, *busiest[:3]} if len(ranks) > MOST_RANKS else ranks
    lines = [
        f"{len(ranks)} ranks ({listed(ranks)}), {sum(map(len, owned.values()))} matrices, "
        f"{len(buckets)} buckets{ways}. Rank {busiest[0]} is the busiest, with {loads[busiest[0]] / mean:.2f} times the "
        f"mean work. The largest matrix is {heaviest / mean:.2f} times the mean work.",
        _ROW.format(*_HEADER),
    ]
    for r in sorted(shown):
        work = f"{loads[r] / 1e12:.3g}", f"{loads[r] / mean:.2f}"
        sizes = map(_mib, bytes_of(schedule, ranks, r, ahead))
        names = listed([schedule.layouts[m].key.short for m in owned[r]], 3)
        lines.append(_ROW.format(r, len(owned[r]), *work, *sizes, names).rstrip())
    if len(shown) < len(ranks):
        lines.append(f"  {len(ranks) - len(shown):,} other ranks are not shown")
    return lines


def _division(engine: Any, ranks: Ranks) -> list[str]:
    """The numbers of owners that differ from one, or that "auto" would choose; at most one line."""
    every = [l for l in engine.schedule.layouts if l.holders == ranks and not l.frozen]
    layouts = [layout for layout in every if not layout.key.block[0]]
    algorithms = (engine.params[l.key.index].formulas.ns_algorithm for l in layouts)
    members = Counter(map(Class.of, layouts, algorithms))
    # In a dry run, fake tensors have no values.
    with unset_fake_temporarily():
        _, slow = best_division(members, ranks, 1)
        best, fast = best_division(members, ranks, ranks_per_node())
    verb = "has"
    counts = {layout.full_shape: layout.key.block[1] for layout in layouts}
    if max(counts.values()) == 1:
        verb = 'is 1; "auto" would have'
        counts = {of.shape: count for of, count in best.items()}
    named = [f"{n} for {' x '.join(map(str, s))}" for s, n in counts.items() if n > 1]
    if not named:
        return []
    text = f"  owners_per_matrix {verb} {listed(named, 4)}. On H100s, "
    text += f'"auto" brings Newton-Schulz from {1e3 * slow:.3g} to {1e3 * fast:.3g} ms.'
    return [text]


def bytes_of(
    schedule: Schedule, ranks: Ranks, rank: int, ahead: int
) -> tuple[int, int, int]:
    """Bytes that ``rank`` sends, receives and has memory for, with ``ahead`` prefetched buckets of ``ranks``."""
    buckets = [b for b in schedule.buckets if b.ranks == ranks]
    of_buckets = [schedule.packs(b, rank) for b in buckets]
    sent = received = copied = 0
    for bucket, pack in zip(buckets, of_buckets):
        sides = pack.gather_send, pack.scatter_send
        relayed = sum(r.pack.nbytes for r in pack.relays if r.source == rank)
        sent += sum(side.nbytes for side in sides) + relayed
        received += pack.gather_recv.nbytes + pack.scatter_recv.nbytes
        received += sum(r.pack.nbytes for r in pack.relays) - relayed
        if bucket.node_size > 1:
            # Two levels copy what they send, and twice what they pass on.
            for side, passed in zip(sides, passed_on(schedule, bucket, rank)):
                through = sum(sum(row) for row in passed) * side.dtype.itemsize
                copied = max(copied, side.nbytes + 2 * through)
    passing, arriving = relay_sizes((pack.relays for pack in of_buckets), rank)
    slots = packs.slots_for(ahead)
    memory = sum(out + own for out, own in packs.slot_sizes(of_buckets, slots))
    memory += min(slots, len(buckets)) * copied
    return sent, received, memory + passing + RELAYS_IN_FLIGHT * arriving
