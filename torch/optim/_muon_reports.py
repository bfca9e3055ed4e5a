"""Reports to the users of a Muon: the text of ``describe()``, and warnings about probable mistakes."""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn, Tensor

from ._muon_engine import fsdp1, fsdp2
from ._muon_engine.plan import Bucket, Move, Phase, ROUNDS_IN_FLIGHT
from ._muon_engine.process_groups import counted, listed
from ._muon_engine.step import TOGETHER_BYTES
from ._newton_schulz import NS_DTYPE
from ._newton_schulz_variants import newton_schulz_numel


# Steps in a row, at any time of training.
STEPS_WITHOUT_ANY = 3
STEPS_WITHOUT_ONE = 20
_CAUSES = (
    "The model may have other parameters now: if it was sharded (fully_shard, parallelize_module, Fabric.setup) or a weight was "
    "replaced (load_state_dict(assign=True)) after this Muon was built, build Muon from the new ones. If FSDP2 had unsharded the "
    "model at that time, as a forward without a backward leaves it, call model.reshard() and build Muon again"
)


def coverage(muon: Any, model: Any, others: Sequence[Any]) -> str:
    """How much Muon has, its share of ``model``, and the matrices that no optimizer has."""
    own = set(muon._tensors())
    trained = own.union(
        *(group["params"] for other in others for group in other.param_groups)
    )
    untrained: list[Any] = []
    total = shared = 0
    for param, name, shape in _tensors_of(model):
        total += math.prod(shape)
        shared += math.prod(shape) * (param in own)
        if param not in trained and len(shape) > 1:
            untrained.append(name)
    text = f"Muon has {counted(len(own), 'parameter')}"
    if total:
        text += f", {shared / total:.1%} of the model's {total:,} elements"
    if untrained:
        text += f"\nNo optimizer given here has {listed(untrained)}"
    return text


def _tensors_of(model: Any) -> list[tuple[Tensor, Any, Sequence[int]]]:
    """The parameter, name and whole shape of each tensor of a model, or of a list of its parameters."""
    found: list[tuple[Tensor, Any, Sequence[int]]] = []
    if not isinstance(model, nn.Module):
        for entry in model or ():
            name, param = entry if type(entry) is tuple else (tuple(entry.shape), entry)
            found.append((param, name, param.shape))
        return found
    gathered = fsdp2.gathered(model)
    for _, param, tensors in fsdp1.logical_matrices(model):
        if fsdp2.is_shown(gathered, param):
            # Optimizers have FSDP2's shard, whatever the model shows.
            param = gathered[param].shard
        found += [(param, name, shape) for name, shape in tensors]
    return found


def in_full(engine: Any) -> str:
    """The owners, the busiest one, and the memory of a step."""
    here = f"Rank {engine.rank} of {engine.world_size}"
    if not engine.is_packed:
        owned = engine.assignments.get(engine.rank, ())
        names = [engine.params[index].described for index in owned]
        return f"{here} owns {listed(names) or 'nothing'}. The user's functions exchange matrices"
    plan = engine.plan
    owned = [m for m, o in zip(plan.matrices, plan.owners) if o == engine.rank]
    names = [matrix.name or matrix.described for matrix in owned]
    return (
        f"{here} owns {listed(names) or 'nothing'}. {in_a_line(engine)}.\nBesides parameters, gradients and momentum, a step of "
        f"this rank takes up to {_memory(engine) / 2**20:.4g} MiB"
    )


def in_a_line(engine: Any) -> str:
    """How many matrices an engine has, and its busiest owner."""
    work: Counter[int] = Counter()
    for layout in {matrix.layout for matrix in engine.plan.matrices}:
        work.update(dict.fromkeys(layout.ranks, 0))
    for matrix, owner in zip(engine.plan.matrices, engine.plan.owners):
        work[owner] += matrix.flops
    matrices = counted(len(engine.plan.matrices), "matrix", "matrices")
    text = f"{matrices} on {counted(len(work), 'rank')}"
    if work.total():
        busiest, most = max(work.items(), key=lambda item: item[1])
        text += f". The busiest owner is rank {busiest}, with {most * len(work) / work.total():.2f} times the mean work"
    return text


def _memory(engine: Any) -> int:
    """The most bytes that the operations of a step have at the same time."""
    plan, itemsize = engine.plan, NS_DTYPE.itemsize
    live = most = 0

    def with_copies(moves: Sequence[Move]) -> int:
        """The bytes while regions are blended, or while updates become the dtype of the parameters."""
        copied = 0
        for index, region in moves:
            dtype = plan.matrices[index].dtype
            if dtype != NS_DTYPE:
                copied += region.numel * dtype.itemsize
        return live + min(copied, TOGETHER_BYTES)

    for phase, index in plan.operations:
        bucket = plan.buckets[index]
        exchange = bucket.exchange
        packed = sum(exchange.send_sizes) + sum(exchange.receive_sizes)
        rounds = [sum(m.region.numel for m in r.incoming) for r in bucket.rounds]
        if rounds:
            packed += sum(move.region.numel for move in bucket.kept)
        has_row = len(bucket.row) > 1
        if phase is Phase.GATHER:
            live += packed * itemsize
            most = max(most, with_copies(exchange.outgoing))
        elif phase is Phase.COMPUTE:
            most = max([most, *(live + size for size in _workspaces(engine, bucket))])
        if phase is (Phase.FORWARD if has_row else Phase.COMPUTE):
            live += sum(rounds[:ROUNDS_IN_FLIGHT]) * itemsize
        if phase is Phase.APPLY:
            for number, received in enumerate(rounds):
                most = max(most, with_copies(bucket.rounds[number].incoming))
                following = number + ROUNDS_IN_FLIGHT
                live += (sum(rounds[following : following + 1]) - received) * itemsize
            most = max(most, with_copies(exchange.outgoing))
            live -= packed * itemsize
        most = max(most, live)
    return most


def _workspaces(engine: Any, bucket: Bucket) -> Iterator[int]:
    """The bytes of Newton-Schulz, or of updates and the regions of this rank, for each batch of a bucket."""
    counts: Counter[Any] = Counter()
    for index in bucket.owned:
        matrix = engine.plan.matrices[index]
        formulas = engine.params[matrix.index].formulas
        most = formulas.batch_size(matrix.shape, engine.device)
        counts[matrix.shape] = min(most, counts[matrix.shape] + 1)
        iterates = newton_schulz_numel(matrix.shape, formulas.ns_algorithm)
        iterates *= NS_DTYPE.itemsize
        stored = matrix.layout.numel_of(engine.rank) * matrix.dtype.itemsize
        updates = matrix.numel * NS_DTYPE.itemsize
        yield counts[matrix.shape] * max(iterates, updates + stored)


class Hints:
    """Warns about parameters without gradients in the steps of ``engine``: each once, on the first rank of a grid."""

    def __init__(self, engine: Any) -> None:
        self._trained = sum(not param.frozen for param in engine.params)
        # Parameters that this rank speaks for. A rank with an empty shard may have no gradient, and neither may
        # an expert that no token was routed to.
        self._watched: dict[int, str] = {}
        for matrix in engine.plan.matrices:
            ranks = matrix.layout.ranks
            speaker = ranks[0] if len(ranks) > 1 else 0
            if engine.rank == speaker and matrix.expert is None:
                if matrix.layout.numel_of(engine.rank):
                    self._watched[matrix.index] = matrix.described
        self._last_step = 0
        # Of those that had no gradient in the last step: how many steps in a row.
        self._steps_without: Counter[int] = Counter()
        self._steps_without_any = 0

    def look(self, step: int, without_gradient: Sequence[Any]) -> None:
        """Looks at a step in which some parameters had no gradient. Other steps need no look."""
        if step != self._last_step + 1:
            self._steps_without.clear()
            self._steps_without_any = 0
        self._last_step = step
        indices = {param.index for param in without_gradient} & self._watched.keys()
        self._steps_without = Counter(
            {index: self._steps_without[index] + 1 for index in indices}
        )
        has_none = len(without_gradient) == self._trained and bool(indices)
        self._steps_without_any = self._steps_without_any + 1 if has_none else 0
        if self._steps_without_any >= STEPS_WITHOUT_ANY:
            # This names all of them.
            self._watched = {}
            warnings.warn(
                f"no parameter of this Muon has had a gradient in {self._steps_without_any} steps. {_CAUSES}",
                stacklevel=2,
            )
            return
        counts = sorted(self._steps_without.items())
        late = [index for index, steps in counts if steps >= STEPS_WITHOUT_ONE]
        if late:
            names = listed([self._watched.pop(index) for index in late])
            warnings.warn(
                f"these have had no gradient in {STEPS_WITHOUT_ONE} steps; if intended, freeze them with requires_grad_(False): "
                f"{names}. {_CAUSES}",
                stacklevel=2,
            )
