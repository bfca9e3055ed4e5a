# Owner(s): ["oncall: distributed"]
"""A step of the distributed Muon: its computation, traffic, memory, and order."""

import contextlib
import itertools
import logging
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import _muon_formulas, Muon
from torch.optim._newton_schulz import _zeropower_via_newtonschulz
from torch.optim._muon import MuonFormulas
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    as_on_an_accelerator,
    Collectives,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    held,
    LiveBytes,
    local,
    mesh_of,
    NewtonSchulzCalls,
    ParityAssertions,
    piece_of,
    R,
    S0,
    S1,
    specs,
    Twins,
)


ALL_TO_ALL = ("alltoall_base_", (0, 1, 2, 3))
STATUSES = ("allreduce_", ())


class WatchedWork:
    """The handle of a collective. Counts how often the engine waits for it.

    ``on_wait`` runs after each wait.
    """

    def __init__(self, work, on_wait=lambda: None):
        self.work = work
        self.waits = 0
        self.on_wait = on_wait

    def wait(self):
        self.waits += 1
        self.work.wait()
        self.on_wait()


@contextlib.contextmanager
def watched_all_to_alls():
    """The handles of all following all-to-alls."""
    works, original = [], dist.all_to_all_single

    def watched(*args, **kwargs):
        works.append(WatchedWork(original(*args, **kwargs)))
        return works[-1]

    with mock.patch.object(dist, "all_to_all_single", watched):
        yield works


class Timeline(logging.Handler):
    """The order of one rank's step, one letter for each event.

    G and S start a gather and a scatter, g and s wait for one, N orthogonalizes a matrix. The DEBUG
    lines that Muon writes before a gather tell a gather from a scatter.
    """

    def __init__(self):
        super().__init__()
        self.letters = []
        self.gathering = False

    def emit(self, record):
        self.gathering = ": gather parameter " in record.getMessage()

    def start(self, *args, **kwargs):
        letter = "G" if self.gathering else "S"
        self.gathering = False
        self.letters.append(letter)
        work = self.all_to_all_single(*args, **kwargs)
        return WatchedWork(work, lambda: self.letters.append(letter.lower()))

    def newton_schulz(self, *args):
        self.letters.append("N")
        return self.original(*args)

    def of(self, step):
        """The letters of ``step()``."""
        log = logging.getLogger("torch.optim.muon")
        self.all_to_all_single = dist.all_to_all_single
        self.original = _muon_formulas.newton_schulz
        log.addHandler(self)
        level, log.propagate = log.level, False
        log.setLevel(logging.DEBUG)
        try:
            with (
                mock.patch.object(dist, "all_to_all_single", self.start),
                mock.patch.object(_muon_formulas, "newton_schulz", self.newton_schulz),
            ):
                step()
        finally:
            log.removeHandler(self)
            log.setLevel(level)
            log.propagate = True
        return "".join(self.letters)


@requires_gloo()
class TestMuonOrder(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    """The flags decide the order of a step and nothing else."""

    world_size = 4

    def timelines(self, *flags):
        """Each rank's timeline of a step over 16 matrices, of which each rank owns four."""
        twins = Twins(
            specs(mesh_of(4), [(S0,)], [(8, 8)] * 16), create_dtensor_config(*flags)
        )
        twins.step()
        twins.set_gradients()
        mine = Timeline().of(twins.optimizer.step)
        twins.single.step()
        self.assertParity(twins, f"{flags}")
        return everyone(mine)

    def expected(self, ahead, matrices):
        """The timeline of buckets of which this rank owns ``matrices``."""
        count = len(matrices)
        letters = "G" * min(ahead + 1, count)
        for k, owned in enumerate(matrices):
            letters += "g" + "N" * owned + "S"
            letters += "s" if k else ""
            letters += "G" if k + ahead + 1 < count else ""
        return letters + "s"

    def test_prefetch_count_is_the_number_of_gathers_in_flight(self):
        for ahead in range(4):
            expected = self.expected(ahead, [1, 1, 1, 1])
            self.assertEqual(self.timelines(True, ahead), [expected] * 4)

    def test_without_async_gpu_parallelism_owners_take_turns(self):
        turns = [[4 * (bucket == rank) for bucket in range(4)] for rank in range(4)]
        for ahead in (1, 2):
            expected = [self.expected(ahead, mine) for mine in turns]
            self.assertEqual(self.timelines(False, ahead), expected)
        # Debug mode: each owner finishes before the next one starts.
        expected = ["".join("Gg" + "N" * n + "Ss" for n in mine) for mine in turns]
        self.assertEqual(self.timelines(False, 0), expected)


@requires_gloo()
class TestMuonExchange(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def placed(self):
        """Layouts over all four ranks, replicated and not."""
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (16, 24)]
        meshes = mesh_of(4), grid_of(2, 2)
        layouts = (specs(mesh, all_placements(mesh), shapes) for mesh in meshes)
        return list(itertools.chain(*layouts))

    def owner_of(self, optimizer):
        return {i: r for r, owned in optimizer.assignments.items() for i in owned}

    # Newton-Schulz

    def test_each_matrix_is_orthogonalized_once(self):
        for parallel in (True, False):
            twins = Twins(self.placed(), create_dtensor_config(parallel))
            twins.set_gradients()
            with NewtonSchulzCalls() as calls:
                twins.optimizer.step()
            for rank, shapes in enumerate(everyone(calls.shapes)):
                owned = twins.optimizer.assignments[rank]
                expected = sorted(twins.specs[i].shape for i in owned)
                self.assertEqual(sorted(shapes), expected)
            owners = self.owner_of(twins.optimizer)
            self.assertEqual(sorted(owners), list(range(len(twins.specs))))

    def test_hsdp_orthogonalizes_once_and_not_per_replica(self):
        twins = Twins(specs(grid_of(2, 2), [(R, S0)], [(8, 8)] * 4))
        twins.set_gradients()
        with NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        self.assertEqual(everyone(len(calls.shapes)), [1] * 4)

    # Bytes

    def expected_traffic(self, twins):
        """Elements that each rank must send to each other rank, from the placements alone.

        Each element enters its owner once, from the owner's own replica. Each rank receives the elements
        that it holds once.
        """
        traffic = [[0] * 4 for _ in range(4)]
        everything = everyone([held(spec) for spec in twins.specs])
        for i, owner in self.owner_of(twins.optimizer).items():
            spec = twins.specs[i]
            holdings = [of_rank[i] for of_rank in everything]
            for rank in set(range(4)) - {owner}:
                traffic[owner][rank] += len(holdings[rank])
                if self.replica_of(spec, rank) == self.replica_of(spec, owner):
                    missing = holdings[rank] - holdings[owner]
                    traffic[rank][owner] += len(missing)
        return traffic

    def replica_of(self, spec, rank):
        at = (spec.mesh.mesh == rank).nonzero()[0].tolist()
        return [c for c, p in zip(at, spec.placements) if p.is_replicate()]

    def test_bytes_sent_are_what_the_placements_need(self):
        mesh, grid = mesh_of(4), grid_of(2, 2)
        for flags, dtype, on in (
            ((True, 1), torch.float32, grid),
            ((True, 0), torch.float32, mesh),
            ((False, 0), torch.float64, mesh),
            ((True, 4), torch.bfloat16, mesh),
        ):
            layout = specs(on, all_placements(on), dtype=dtype)
            twins = Twins(layout, create_dtensor_config(*flags))
            mine = [0] * 4
            for call in self.collectives_of_a_step(twins).calls:
                if call.name == "alltoall_base_":
                    # Matrices travel in bfloat16, whatever their own dtype.
                    self.assertEqual(call.itemsize, 2)
                    for peer, elements in zip(call.ranks, call.sent):
                        mine[peer] += elements
            self.assertEqual(everyone(mine), self.expected_traffic(twins))

    # Collectives

    def collectives_of_a_step(self, twins, missing=()):
        twins.set_gradients(missing)
        with Collectives() as seen:
            twins.optimizer.step()
        return seen

    def test_two_collectives_a_bucket_and_one_of_statuses(self):
        # One matrix for each owner is one bucket, and four are four buckets.
        for buckets in (1, 4):
            twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 4 * buckets))
            names = self.collectives_of_a_step(twins).names()
            self.assertEqual(names, [STATUSES] + [ALL_TO_ALL] * 2 * buckets)
        twins = Twins(specs(mesh_of(1), [(S0,), (R,)]))
        self.assertEqual(self.collectives_of_a_step(twins).calls, [])

    def test_gradients_do_not_change_the_calls(self):
        twins = Twins(self.placed())
        usual = self.collectives_of_a_step(twins)
        self.assertEqual(everyone(usual.names()), [usual.names()] * 4)
        for missing in ([0], range(0, len(twins.params), 3), range(len(twins.params))):
            now = self.collectives_of_a_step(twins, missing)
            self.assertEqual(now.calls, usual.calls)
        # Accelerators make the same calls even if ranks disagree about gradients.
        as_on_an_accelerator(twins.optimizer)
        twins.set_gradients()
        for i, param in enumerate(twins.params):
            if i % 4 == self.rank:
                param.grad = None
        with Collectives() as seen:
            twins.optimizer.step()
        self.assertEqual(seen.calls, usual.calls)
        with self.assertRaisesRegex(RuntimeError, "gradient"):
            twins.optimizer.synchronize()

    # Memory

    def test_memory_stays_within_the_buckets_in_flight(self):
        matrix = full(0, (64, 96), torch.bfloat16)
        with LiveBytes() as alone:
            _zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
        for ahead, placement in enumerate((S0, S1, R)):
            twins = Twins(
                specs(mesh_of(4), [(placement,)], [matrix.shape] * 16),
                create_dtensor_config(prefetch_count=ahead),
                foreach=False,
            )
            twins.set_gradients()
            with LiveBytes() as alive, Collectives() as seen:
                twins.optimizer.step()
            sizes = [c.itemsize * (sum(c.sent) + sum(c.received)) for c in seen.calls]
            # A slot has room for what a bucket's gather sends and receives.
            bound = (ahead + 2) * max(sizes)
            # Newton-Schulz, the matrix that an owner assembles for it, and the result.
            bound += alone.peak + 2 * matrix.nbytes
            # The momentum, one blend of it at a time, and this rank's and all ranks' statuses.
            bound += 17 * local(twins.params[0]).nbytes + 2 * 256 * 7 * 8 + 4096
            within = 0 < alive.peak <= bound
            self.assertEverywhere([] if within else [f"{alive.peak} of {bound}"])
            # No bucket took a slot that another one still needed.
            twins.single.step()
            self.assertParity(twins)

    # Gradients

    def test_no_gradient_on_any_rank_is_skipped(self):
        twins = Twins(self.placed())
        missing = range(0, len(twins.params), 2)
        with NewtonSchulzCalls() as calls:
            twins.set_gradients(missing)
            twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins)
        for i in missing:
            start = full(twins.seed + i, twins.specs[i].shape)
            expected = piece_of(start, twins.specs[i])
            self.assertTrue(torch.equal(local(twins.params[i]), expected))
        # An owner whose shard is empty cannot know that a gradient is missing.
        owned = twins.optimizer.assignments[self.rank]
        expected = [i for i in owned if i not in missing or not held(twins.specs[i])]
        self.assertEqual(everyone(len(calls.shapes)), everyone(len(expected)))
        # Gradients that come late, and go again.
        absent = [(), range(0, len(twins.params), 3)]
        self.assertTrainsAlike(twins, 2, missing=absent.__getitem__)

    def test_gradient_on_some_holders_only_is_an_error_before_anything_moves(self):
        """Both had moved when the error came once, and the optimizer refused to go on."""
        for lacking, placement in ((0, S0), (3, S1), (2, R)):
            twins = Twins(specs(mesh_of(4), [(placement,)], [(8, 8)] * 3))
            twins.step()
            twins.set_gradients(missing=(1,) if self.rank == lacking else ())
            states = [twins.optimizer.state[param] for param in twins.params]
            tensors = twins.params + [state["momentum_buffer"] for state in states]
            before = [local(tensor.detach()).clone() for tensor in tensors]
            pattern = r"some have none[^']* parameter 1 of shape \(8, 8\)$"
            self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)
            with self.everywhere():
                self.assertEqual([local(t.detach()) for t in tensors], before)
            twins.set_gradients()
            twins.optimizer.step()
            twins.single.step()
            self.assertParity(twins)

    def test_mismatch_among_experts_is_an_error_on_all_ranks(self):
        """Ranks that share no expert with the mismatch waited for the others in the next exchange."""
        grid = grid_of(2, 2)
        layout = specs(grid, [(S0, R)], [(8, 8)] * 2)
        layout += specs(grid["b"], [(S0,)], [(6, 6)])
        twins = Twins(layout)
        twins.set_gradients(missing=(2,) if self.rank == 0 else ())
        # Ranks 0 and 1 share it.
        pattern = "some have none" if self.rank < 2 else "in others that this rank"
        self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)
        twins.set_gradients()
        twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins)

    def test_ranks_that_are_not_in_the_same_step(self):
        # With equal sizes, all exchanges would fit.
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 8))
        twins.step()
        twins.set_gradients()
        before = [local(param.detach()).clone() for param in twins.params]
        if self.rank == 2:
            # A step that the other ranks do not make.
            with contextlib.suppress(KeyError):
                twins.optimizer.step({}.popitem)
        for _ in range(2):
            pattern = "not in the same step"
            self.assertRaisesEverywhere(twins.optimizer.step, RuntimeError, pattern)
        after = [local(param.detach()) for param in twins.params]
        self.assertEqual(after, before)

    def test_mismatches_on_an_accelerator_are_seen_in_the_next_step(self):
        # A step does not wait for the device to learn the statuses of other ranks.
        placed = specs(grid_of(2, 2), [(S0, R), (S0, S1)], [(8, 8), (16, 12), (9, 7)])
        named = r"parameter 0.* \(8, 8\)"
        for look in (Muon.step, Muon.state_dict, Muon.synchronize):
            twins = Twins(placed, weight_decay=0.2, foreach=False)
            twins.step()
            as_on_an_accelerator(twins.optimizer)
            self.assertTrainsAlike(twins, 2, missing=[(1,), ()].__getitem__)
            twins.set_gradients(missing=(0,) if self.rank == 1 else ())
            with self.everywhere():
                with self.assertNoLogs("torch.optim.muon", "WARNING"):
                    twins.optimizer.step()
                with self.assertRaisesRegex(RuntimeError, named):
                    look(twins.optimizer)
                # Raised once. After that, state_dict() only warns, so that a user can save.
                with self.assertLogs("torch.optim.muon", "WARNING") as seen:
                    twins.optimizer.state_dict()
                self.assertRegex(seen.output[0], named)
                with self.assertRaisesRegex(RuntimeError, "Rebuild it"):
                    twins.optimizer.step()

    def test_gradient_of_an_empty_shard_does_not_matter(self):
        for accelerator, others_have_one in itertools.product((False, True), repeat=2):
            message = f"{accelerator=} {others_have_one=}"
            # Rank 3 has an empty shard of the first matrix.
            layout = specs(mesh_of(4), [(S0,)], [(3, 9), (8, 8)])
            twins = Twins(layout, foreach=False)
            twins.step()
            self.assertParity(twins)
            if accelerator:
                as_on_an_accelerator(twins.optimizer)
            twins.set_gradients([] if others_have_one else [0])
            if self.rank == 3:
                empty = torch.zeros_like(twins.params[0])
                twins.params[0].grad = None if others_have_one else empty
            twins.single.step()
            twins.optimizer.step()
            self.assertParity(twins, message)
            # On an accelerator, this looks at the statuses of the last step.
            with self.assertNoLogs("torch.optim.muon", "WARNING"):
                twins.optimizer.state_dict()
            # That rank hears of a mismatch, too.
            twins.set_gradients([0] if self.rank > 1 else [])
            with self.everywhere(message):
                if accelerator:
                    twins.optimizer.step()
                with self.assertRaisesRegex(RuntimeError, r"parameter 0 .*\(3, 9\)"):
                    twins.optimizer.step()

    # Errors in the middle of a step

    def break_off(self, twins, phase, number, broken=False):
        """On all ranks, call ``number`` of ``phase`` raises while all-to-alls are in flight.

        With ``broken``, waiting for these all-to-alls also raises.
        """
        original, calls, in_flight = getattr(MuonFormulas, phase), [], []

        def lose():
            raise RuntimeError("connection lost")

        def fail(formulas, *args, **kwargs):
            calls.append(phase)
            if len(calls) == number:
                in_flight.extend(work for work in works if not work.waits)
                for work in in_flight if broken else ():
                    work.on_wait = lose
                raise LookupError(f"{phase} {number}")
            return original(formulas, *args, **kwargs)

        twins.set_gradients()
        with watched_all_to_alls() as works:
            with mock.patch.object(MuonFormulas, phase, fail):
                with self.assertRaisesRegex(LookupError, f"^{phase} {number}$"):
                    twins.optimizer.step()
        self.assertGreater(len(in_flight), 0)
        # The engine has waited for each of them once.
        self.assertEqual([work.waits for work in works], [1] * len(works))

    def test_error_in_the_middle_of_a_step_leaves_nothing_in_flight(self):
        for ahead, phase, number, broken in (
            (0, "orthogonalize", 2, False),
            (2, "orthogonalize", 1, False),
            (2, "prepare", 5, False),
            (1, "apply", 3, False),
            (2, "orthogonalize", 3, True),
        ):
            message = f"{ahead=} {phase} {number} {broken=}"
            # In each of four buckets, each rank owns one matrix.
            layout = specs(mesh_of(4), [(S0,)], [(8, 8)] * 16)
            twins = Twins(layout, create_dtensor_config(prefetch_count=ahead))
            twins.step()
            self.assertParity(twins)
            with self.everywhere(message):
                self.break_off(twins, phase, number, broken)
            # The group is free: other collectives do not pair up with those of the step.
            sums = torch.full((3,), float(self.rank))
            dist.all_reduce(sums, group=mesh_of(4).get_group())
            with self.everywhere(message):
                self.assertEqual(sums, torch.full((3,), 6.0))
                with self.assertRaisesRegex(RuntimeError, f"ebuild.*{phase} {number}"):
                    twins.optimizer.step()
        # A new Muon works.
        self.assertTrainsAlike(Twins(layout), 1)


if __name__ == "__main__":
    run_tests()
