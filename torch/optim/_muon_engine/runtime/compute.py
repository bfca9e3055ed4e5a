"""What Muon does with the buckets of a step: gradients and momentum to packs, whole matrices to updates, updates to
parameters. The lists and views that it needs stay the same between steps.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .bound import Batch, BlendedRegions, BoundBucket, UpdatedRegions
from .executor import Progress
from .matrices import LocalMatrix
from .params import StepInputs
from .transport import copy_all, InFlight, LocalBucket


log = logging.getLogger("torch.optim.muon")


class MuonCompute:
    """The phases of a step on this ``rank``, in the words of upstream's proposal for executors of optimizer steps, and
    what relays add.
    """

    def __init__(self, rank: int, progress: Progress) -> None:
        self.rank = rank
        self.progress = progress
        # The work on each bucket, which a Binder has bound.
        self.bound: Mapping[LocalBucket, BoundBucket] = {}

    def prepare(self, bucket: LocalBucket, inputs: StepInputs) -> None:
        """Accumulates the gradients of the bucket's matrices, and packs this rank's shards for their owners. The shards
        of matrices that this rank owns do not travel: :meth:`compute` blends them into the whole matrix.
        """
        for matrices, accumulated, blended in self.bound[bucket].preparations:
            self.progress.now = "gather", matrices
            for param_group, param_indices in accumulated.items():
                inputs.accumulate(param_group, param_indices)
            if log.isEnabledFor(logging.DEBUG):
                self._log("gather", matrices)
            for together in blended:
                self._blend(together, inputs)

    def compute(self, bucket: LocalBucket, batch: Batch, inputs: StepInputs) -> None:
        """Orthogonalizes ``batch``, packs the updates for their holders, and applies this rank's part."""
        matrices = batch.matrices
        present: Sequence[int] = range(len(matrices))
        if not inputs.is_complete:
            present = self._present_places(bucket, batch, inputs)
            if not present:
                return
            if len(present) < len(matrices):
                batch = batch.part(present)
                matrices = [batch.matrices[at] for at in present]
        self.progress.now = "assemble", matrices
        logs = log.isEnabledFor(logging.DEBUG)
        if logs:
            self._log("orthogonalize", matrices)
        for together in batch.own:
            self._blend(together, inputs)
        self.progress.now = "orthogonalize", matrices
        if batch.received.targets:
            torch._foreach_copy_(batch.received.targets, batch.received.sources)
        self._orthogonalize(batch, present, inputs)
        if batch.results.targets:
            torch._foreach_copy_(batch.results.targets, batch.results.sources)
        # Here and not with the updates that arrive, because the next batch takes the memory of this one.
        self.progress.now = "apply", matrices
        if logs:
            self._log("apply", matrices)
        self._apply(batch.applied, inputs)

    def apply_updates(self, bucket: LocalBucket, inputs: StepInputs) -> None:
        """Applies the updates that this rank received."""
        if log.isEnabledFor(logging.DEBUG):
            self._log_received(bucket, bucket.scatter_recv, inputs)
        self._apply(self.bound[bucket].applied, inputs)

    def apply_relayed(
        self, bucket: LocalBucket, relay: Any, inputs: StepInputs
    ) -> None:
        """Applies the updates that this rank received over a relay."""
        if log.isEnabledFor(logging.DEBUG):
            self._log_received(relay, relay.packed, inputs)
        self._apply(self.bound[bucket].relayed.get(relay, ()), inputs)

    def _blend(self, together: BlendedRegions, inputs: StepInputs) -> None:
        """Writes regions of the tensors to orthogonalize: momentum, blended with the gradient if nesterov.
        Without a gradient, that is momentum, so that the owner receives defined values. Kernels take gradients into
        momentum in the same pass.
        """
        momenta, gradients = [], []
        for matrix, region, _, is_whole in together.entries:
            of_param = inputs.params[matrix.param_index]
            momentum, gradient = of_param.momentum, of_param.gradient
            if gradient is None and not together.accumulates:
                gradient = momentum
            if not is_whole:
                momentum = region.of_local(momentum)
                if gradient is not None:
                    gradient = region.of_local(gradient)
            momenta.append(momentum)
            gradients.append(gradient)
        formulas = inputs.formulas[together.param_group]
        if together.accumulates:
            formulas.accumulate_and_blend(momenta, gradients, together.targets)
            return
        blended = formulas.blend(momenta, gradients, together.scratch)
        torch._foreach_copy_(together.targets, blended)

    def _present_places(
        self, bucket: LocalBucket, batch: Batch, inputs: StepInputs
    ) -> list[int]:
        """The places of the matrices of a batch to orthogonalize. The others send zeros, which nobody applies."""
        present: list[int] = []
        unsent: list[torch.Tensor] = []
        for place, matrix in enumerate(batch.matrices):
            if matrix.applies(inputs):
                present.append(place)
            else:
                unsent += self.bound[bucket].packed_results[matrix.index]
        if unsent:
            torch._foreach_zero_(unsent)
        return present

    def _orthogonalize(
        self, batch: Batch, present: Sequence[int], inputs: StepInputs
    ) -> None:
        """Replaces the momenta in ``batch.whole`` at the places ``present`` by their updates."""
        first = batch.matrices[0]
        orthogonalize = inputs.formulas[first.param_group].orthogonalize
        if len(batch.matrices) == 1:
            orthogonalize(batch.whole[0], out=batch.whole[0])
            return
        count = len(present)
        moved: list[tuple[torch.Tensor, torch.Tensor]] = []
        if count < len(batch.matrices):
            # The first places, without gaps: the last matrices move there meanwhile.
            gaps = sorted({*range(count)} - {*present})
            fillers = [place for place in present if place >= count]
            for gap, filler in zip(gaps, fillers, strict=True):
                moved.append((batch.whole[gap], batch.whole[filler]))
            copy_all(moved)
        whole = batch.whole[:count]
        if count == 1:
            orthogonalize(whole[0], out=whole[0])
        else:
            orthogonalize(whole, out=whole)
        copy_all([(filler, gap) for gap, filler in moved])

    def _apply(self, updated: Sequence[UpdatedRegions], inputs: StepInputs) -> None:
        """Decays regions of parameters, and updates those that have an update."""
        for together in updated:
            if not inputs.is_complete:
                together = together.present(inputs)
            if not together.entries:
                continue
            local = []
            for matrix, region, _, is_whole in together.entries:
                part = inputs.params[matrix.param_index].local
                local.append(part if is_whole else region.of_local(part))
            updates, device = together.updates, local[0].device
            if updates is not None and device != updates[0].device:
                updates = [update.to(device) for update in updates]
            inputs.apply(together.param_group, together.shape, local, updates)

    def _log(self, phase: str, matrices: Iterable[LocalMatrix]) -> None:
        for matrix in matrices:
            values = self.rank, phase, matrix.layout.describe(), matrix.owner
            log.debug("rank %d: %s %s, owner %d", *values)

    def _log_received(
        self, flight: InFlight, received: Any, inputs: StepInputs
    ) -> None:
        """Logs the updates of other owners' matrices that have come, or that this rank has no element of."""
        for matrix in flight.matrices:
            if matrix.owner == self.rank or not matrix.applies(inputs):
                continue
            if received.of(matrix.index) or not matrix.shard:
                self._log("apply", [matrix])
