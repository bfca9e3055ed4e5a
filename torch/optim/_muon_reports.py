"""Reports to the users of a Muon: the text of ``describe()``, and warnings about probable mistakes."""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from ._muon_engine import fsdp
from ._muon_engine.plan import Bucket, numel_of, Phase, ROUNDS_IN_FLIGHT
from ._muon_engine.process_groups import listed
from ._muon_engine.step import TOGETHER_BYTES
from ._newton_schulz import NS_DTYPE
from ._newton_schulz_variants import newton_schulz_numel


# Steps in a row, at any time of training.
STEPS_WITHOUT = 10
_CAUSES = (
    "The model may have other parameters now: if it was sharded (fully_shard, parallelize_module, Fabric.setup) or a weight was "
    "replaced (load_state_dict(assign=True)) after this Muon was built, build Muon from the new ones. If FSDP2 had unsharded the "
    "model at that time, as a forward without a backward leaves it, call model.reshard() and build Muon again"
)


def _counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun. The ``plural`` is the noun with an "s" unless another one is given."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {plural or noun + 's'}"


def coverage(muon: Any, model: nn.Module | None, others: Sequence[Any]) -> str:
    """How much Muon has, and the matrices of ``model`` that no optimizer has."""
    trained = set(muon._tensors())
    text = f"Muon has {_counted(len(trained), 'parameter')}"
    if model is None:
        return text
    for other in others:
        for group in other.param_groups:
            trained.update(group["params"])
    fsdp.check_resharded(model)
    untrained: list[str] = []
    for _, param, tensors in fsdp.logical_matrices(model):
        for name, shape in tensors:
            if param not in trained and len(shape) > 1:
                untrained.append(name)
    if untrained:
        text += f"\nNo optimizer given here has {listed(untrained)}"
    return text


def in_full(engine: Any) -> str:
    """The owners, the busiest one, and the memory of a step."""
    here = f"Rank {engine.rank} of {engine.world_size}"
    if not engine.is_packed:
        return f"{here}. The user's functions exchange matrices; assignments has the owners"
    plan = engine.plan
    work: Counter[int] = Counter()
    for layout in {matrix.layout for matrix in plan.owners}:
        work.update(dict.fromkeys(layout.ranks, 0))
    names: list[str] = []
    for matrix, owner in plan.owners.items():
        work[owner] += matrix.flops
        if owner == engine.rank:
            names.append(matrix.name or matrix.described)
    busiest = max(work, key=lambda rank: work[rank], default=engine.rank)
    share = work[busiest] * len(work) / max(1, work.total())
    matrices = _counted(len(plan.owners), "matrix", "matrices")
    return (
        f"{here} owns {listed(names) or 'nothing'}. It shares {matrices} on {_counted(len(work), 'rank')}. The busiest owner is rank {busiest}, "
        f"with {share:.2f} times the mean work.\nBesides parameters, gradients and momentum, a step of this rank takes up to "
        f"{_memory(engine) / 2**20:.4g} MiB"
    )


def _memory(engine: Any) -> int:
    """The most bytes that a step has at the same time: of buckets in flight, of rounds along a column, and of a batch."""
    plan, itemsize = engine.plan, NS_DTYPE.itemsize
    live = most = 0
    for phase, index in plan.operations:
        bucket = plan.buckets[index]
        held = numel_of(bucket.held)
        received = 0
        for of_round in bucket.rounds[:ROUNDS_IN_FLIGHT]:
            received += sum(of_round.sizes)
        packed = held + sum(bucket.receive_sizes)
        # Regions are blended and updated in the dtype of parameters.
        working = 0
        dtype = bucket.matrices[0].param.traits.momentum_dtype
        if dtype != NS_DTYPE:
            working = min(TOGETHER_BYTES, max(held, received) * dtype.itemsize)
        if phase is Phase.GATHER:
            live += packed * itemsize
        elif phase is Phase.COMPUTE:
            working = _workspace(engine, bucket)
        most = max(most, live + working)
        if phase is (Phase.FORWARD if len(bucket.row) > 1 else Phase.COMPUTE):
            live += received * itemsize
        elif phase is Phase.APPLY:
            live -= (packed + received) * itemsize
    return most


def _workspace(engine: Any, bucket: Bucket) -> int:
    """The bytes of Newton-Schulz for the largest batch of a bucket."""
    most = 0
    counts: Counter[Any] = Counter()
    for matrix in bucket.owned:
        formulas = matrix.param.formulas
        counts[matrix.shape] += 1
        limit = formulas.batch_size(matrix.shape, engine.device)
        numel = newton_schulz_numel(matrix.shape, formulas.ns_algorithm)
        most = max(most, min(limit, counts[matrix.shape]) * numel)
    return most * NS_DTYPE.itemsize


class Hints:
    """Warns about parameters without gradients in the steps of ``engine``: each once, on the first rank of a grid."""

    def __init__(self, engine: Any) -> None:
        # The indices of parameters that this rank speaks for. A rank with an empty shard may have no gradient, and neither
        # may an expert that no token was routed to.
        self._watched: set[int] = set()
        for matrix in engine.plan.owners:
            ranks = matrix.layout.ranks
            speaker = ranks[0] if len(ranks) > 1 else 0
            if engine.rank == speaker and matrix.param.expert is None:
                if matrix.layout.numel_of(engine.rank):
                    self._watched.add(matrix.index)
        self._last_step = 0
        # Of those that had no gradient in the last step: how many steps in a row.
        self._steps_without: dict[int, int] = {}

    def look(self, step: int, without_gradient: Sequence[Any]) -> None:
        """Looks at a step in which some parameters had no gradient. Other steps need no look."""
        before = self._steps_without if step == self._last_step + 1 else {}
        self._last_step, self._steps_without = step, {}
        late: list[str] = []
        for param in without_gradient:
            if param.index not in self._watched:
                continue
            steps = before.get(param.index, 0) + 1
            self._steps_without[param.index] = steps
            if steps >= STEPS_WITHOUT:
                self._watched.remove(param.index)
                late.append(param.described)
        if late:
            warnings.warn(
                f"these have had no gradient in {STEPS_WITHOUT} steps; if intended, freeze them with requires_grad_(False): "
                f"{listed(late)}. {_CAUSES}",
                stacklevel=2,
            )
