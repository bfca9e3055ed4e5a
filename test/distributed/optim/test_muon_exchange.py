# Owner(s): ["oncall: distributed"]
"""A step of the distributed Muon: its computation, traffic, memory, and order."""

import contextlib
import itertools
import logging
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import _newton_schulz, Muon
from torch.optim._muon import MuonFormulas
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
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
    place,
    R,
    S0,
    S1,
    Spec,
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

    def newton_schulz(self, *args, **kwargs):
        self.letters.append("N")
        return self.zeropower(*args, **kwargs)

    def of(self, step):
        """The letters of ``step()``."""
        log = logging.getLogger("torch.optim.muon")
        self.all_to_all_single = dist.all_to_all_single
        self.zeropower = _newton_schulz._zeropower_via_newtonschulz
        log.addHandler(self)
        level, log.propagate = log.level, False
        log.setLevel(logging.DEBUG)
        try:
            with (
                mock.patch.object(dist, "all_to_all_single", self.start),
                mock.patch.object(
                    _newton_schulz, "_zeropower_via_newtonschulz", self.newton_schulz
                ),
            ):
                step()
        finally:
            log.removeHandler(self)
            log.setLevel(level)
            log.propagate = True
        return "".join(self.letters)


def as_on_an_accelerator(optimizer):
    """From now on, ``optimizer`` looks for mismatches where a step on an accelerator does.

    Its first step has made the buffers, which are on the CPU. Later steps also accumulate the gradients
    of a bucket together.
    """
    engine = optimizer._engine
    engine.device = engine._runner.device = torch.device("cuda")


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
        mesh = mesh_of(4)
        grid = grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (16, 24)]
        return specs(mesh, all_placements(mesh), shapes) + specs(
            grid, all_placements(grid), shapes
        )

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

    def check_traffic(self, layout, *flags):
        twins = Twins(layout, create_dtensor_config(*flags))
        mine = [0] * 4
        for call in self.collectives_of_a_step(twins).calls:
            if call.name == "alltoall_base_":
                # Matrices travel in bfloat16, whatever their own dtype.
                self.assertEqual(call.itemsize, 2)
                for peer, elements in zip(call.ranks, call.sent):
                    mine[peer] += elements
        self.assertEqual(everyone(mine), self.expected_traffic(twins))

    def test_bytes_sent_are_what_the_placements_need(self):
        mesh, grid = mesh_of(4), grid_of(2, 2)
        shapes = [(8, 8), (7, 5), (3, 9), (16, 24)]
        for on in (mesh, grid):
            self.check_traffic(specs(on, all_placements(on), shapes))

    def test_bytes_sent_do_not_depend_on_flags_or_dtypes(self):
        mesh = mesh_of(4)
        for flags in ((True, 0), (True, 4), (False, 0)):
            self.check_traffic(specs(mesh, all_placements(mesh)), *flags)
        for dtype in (torch.float64, torch.bfloat16):
            self.check_traffic(specs(mesh, [(S0,), (R,)], dtype=dtype))

    # Collectives

    def collectives_of_a_step(self, twins, missing=()):
        twins.set_gradients(missing)
        with Collectives() as seen:
            twins.optimizer.step()
        return seen

    def test_two_collectives_a_bucket_and_one_of_statuses(self):
        mesh = mesh_of(4)
        # One matrix for each owner is one bucket.
        twins = Twins(specs(mesh, [(S0,)], [(8, 8)] * 4))
        names = self.collectives_of_a_step(twins).names()
        self.assertEqual(names, [STATUSES, ALL_TO_ALL, ALL_TO_ALL])
        for prefetch in (0, 1, 3):
            twins = Twins(
                specs(mesh, [(S0,), (S1,), (R,)], [(8, 8)] * 8),
                create_dtensor_config(prefetch_count=prefetch),
            )
            for _ in range(2):
                names = self.collectives_of_a_step(twins).names()
                self.assertEqual(names.count(STATUSES), 1)
                # Six matrices for each owner fit into two to four buckets.
                self.assertIn(names.count(ALL_TO_ALL), (4, 6, 8))
                self.assertEqual(set(names), {STATUSES, ALL_TO_ALL})

    def test_one_rank_needs_no_collective(self):
        twins = Twins(specs(mesh_of(1), [(S0,), (R,)]))
        self.assertEqual(self.collectives_of_a_step(twins).calls, [])

    def test_gradients_do_not_change_the_calls(self):
        twins = Twins(self.placed())
        usual = self.collectives_of_a_step(twins)
        self.assertEqual(everyone(usual.names()), [usual.names()] * 4)
        for missing in ([0], range(0, len(twins.params), 3), range(len(twins.params))):
            now = self.collectives_of_a_step(twins, missing)
            self.assertEqual(now.calls, usual.calls)
        # Ranks that disagree about gradients raise after the same calls.
        twins.set_gradients()
        for i, param in enumerate(twins.params):
            if i % 4 == self.rank:
                param.grad = None
        with Collectives() as seen, self.assertRaisesRegex(RuntimeError, "gradient"):
            twins.optimizer.step()
        self.assertEqual(seen.calls, usual.calls)

    # Memory

    def peak_of_newton_schulz(self, shape):
        matrix = full(0, shape, torch.bfloat16)
        with LiveBytes() as bytes_alive:
            _newton_schulz._zeropower_via_newtonschulz(
                matrix, (3.4445, -4.775, 2.0315), 5, 1e-7
            )
        # The owner assembles the matrix itself for it.
        return bytes_alive.peak + matrix.nbytes

    def check_memory(self, twins, shapes):
        largest = max(self.peak_of_newton_schulz(shape) for shape in shapes)
        for _ in range(2):
            twins.set_gradients()
            with LiveBytes() as bytes_alive, Collectives() as seen:
                twins.optimizer.step()
            momentum = sum(
                local(state["momentum_buffer"]).nbytes
                for state in twins.optimizer.state.values()
            )
            sizes = sorted(
                call.itemsize * (sum(call.sent) + sum(call.received))
                for call in seen.calls
            )
            # A bucket has one gather and one scatter. The two largest are at least as large.
            bound = (twins.config.prefetch_count + 2) * sum(sizes[-2:]) + largest
            # The engine blends one piece at a time, in the parameter's own dtype.
            bound += max(local(param).nbytes for param in twins.params)
            if twins.steps == 1:
                bound += momentum
            problems = []
            if not bytes_alive.peak:
                problems.append("no bytes seen")
            if bytes_alive.peak > bound:
                problems.append(f"{bytes_alive.peak} bytes alive, bound {bound}")
            self.assertEverywhere(problems, f"step {twins.steps}")

    def test_memory_stays_within_the_buckets_in_flight(self):
        mesh = mesh_of(4)
        # The number of shapes does not matter either.
        for shapes in ([(64, 96)] * 16, [(64, 64 + 8 * i) for i in range(16)]):
            for prefetch, placement in enumerate((S0, S1, R)):
                config = create_dtensor_config(prefetch_count=prefetch)
                layout = specs(mesh, [(placement,)], shapes)
                self.check_memory(Twins(layout, config, foreach=False), shapes[-1:])

    def test_memory_without_peers_is_that_of_the_largest_matrix(self):
        shapes = [(64, 96)] * 16
        twins = Twins(specs(mesh_of(1), [(S0,)], shapes), foreach=False)
        self.check_memory(twins, shapes[:1])

    # Gradients

    def test_no_gradient_on_any_rank_is_skipped(self):
        twins = Twins(self.placed())
        missing = range(0, len(twins.params), 2)
        with NewtonSchulzCalls() as calls:
            twins.set_gradients(missing)
            twins.optimizer.step()
        twins.single.step()
        self.assertParity(twins)
        for i, param in enumerate(twins.params):
            # The first step makes all buffers, so that checkpoints are the same on all ranks.
            buffer = local(twins.optimizer.state[param]["momentum_buffer"])
            if buffer.numel():
                self.assertEqual(bool(buffer.any()), i not in missing)
            if i in missing:
                start = full(twins.seed + i, twins.specs[i].shape)
                expected = piece_of(start, twins.specs[i])
                self.assertTrue(torch.equal(local(param), expected))
        # An owner whose shard is empty cannot know that a gradient is missing.
        owned = twins.optimizer.assignments[self.rank]
        expected = [i for i in owned if i not in missing or not held(twins.specs[i])]
        self.assertEqual(everyone(len(calls.shapes)), everyone(len(expected)))

    def test_first_gradient_late_and_gone_again(self):
        twins = Twins(self.placed())
        n = len(twins.params)
        absent = [range(n), range(0, n, 2), range(1, n, 2), ()]
        self.assertTrainsAlike(twins, len(absent), missing=absent.__getitem__)

    def test_gradient_on_some_holders_only_is_an_error_on_every_holder(self):
        names = ["first.weight", "expert.weight", "last.weight"]
        for lacking, placement in ((0, S0), (3, S1), (2, R)):
            spec = Spec((8, 8), mesh_of(4), (placement,))
            params = [
                torch.nn.Parameter(place(full(i, spec.shape), spec)) for i in range(3)
            ]
            optimizer = Muon(
                list(zip(names, params)), distributed_config=create_dtensor_config()
            )
            for i, param in enumerate(params):
                if i != 1 or self.rank != lacking:
                    param.grad = torch.ones_like(param)
            with self.assertRaisesRegex(
                RuntimeError, r"parameter 1 'expert\.weight' of shape \(8, 8\)"
            ) as raised:
                optimizer.step()
            text = str(raised.exception)
            self.assertNotRegex(text, r"first\.weight|last\.weight")
            self.assertEqual(everyone(text), [text] * 4)
            for param in params:
                param.grad = torch.ones_like(param)
            with self.assertRaisesRegex(RuntimeError, "[Rr]ebuild"):
                optimizer.step()

    def test_gradient_on_some_holders_only_leaves_other_groups_alone(self):
        mesh = mesh_of(2)
        pair = self.rank // 2
        twins = Twins(specs(mesh, [(S0,), (R,)], [(8, 8), (7, 5)]), seed=70 * pair)
        twins.set_gradients()
        if self.rank == 1:
            twins.params[0].grad = None
        if pair == 0:
            with self.assertRaisesRegex(RuntimeError, "parameter 0"):
                twins.optimizer.step()
        else:
            twins.optimizer.step()
            twins.single.step()
            self.assertEqual(twins.problems(), [])
        # All four ranks are here, and the group of all still works.
        self.assertEqual(everyone(self.rank), [0, 1, 2, 3])

    def test_ranks_that_are_not_in_the_same_step(self):
        # With equal sizes, all exchanges would fit.
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 8))
        twins.step()
        self.assertParity(twins)
        twins.set_gradients()
        before = [local(param.detach()).clone() for param in twins.params]
        if self.rank == 2:
            # A step that the other ranks do not make.
            with contextlib.suppress(KeyError):
                twins.optimizer.step({}.popitem)
        with self.everywhere():
            with self.assertRaisesRegex(RuntimeError, "not in the same step"):
                twins.optimizer.step()
            for param, old in zip(twins.params, before):
                self.assertTrue(torch.equal(local(param.detach()), old))
            with self.assertRaisesRegex(RuntimeError, "[Rr]ebuild.*same step"):
                twins.optimizer.step()

    def test_mismatches_on_an_accelerator_are_seen_in_the_next_step(self):
        # A step does not wait for the device to learn the statuses of other ranks.
        grid = grid_of(2, 2)
        placed = specs(grid, [(S0, R), (S0, S1)], [(8, 8), (16, 12), (9, 7)])
        for look in (lambda o: o.step(), lambda o: o.state_dict()):
            twins = Twins(placed, weight_decay=0.2, foreach=False)
            twins.step()
            as_on_an_accelerator(twins.optimizer)
            self.assertTrainsAlike(twins, 2, missing=[(1,), ()].__getitem__)
            twins.set_gradients(missing=(0,) if self.rank == 1 else ())
            with self.everywhere():
                with self.assertNoLogs("torch.optim.muon", "WARNING"):
                    twins.optimizer.step()
                with self.assertRaisesRegex(RuntimeError, r"parameter 0.* \(8, 8\)"):
                    look(twins.optimizer)
                # Raised once. After that, state_dict() only warns, so that a user can save.
                with self.assertLogs("torch.optim.muon", "WARNING") as seen:
                    twins.optimizer.state_dict()
                self.assertRegex(seen.output[0], r"parameter 0.* \(8, 8\)")
                with self.assertRaisesRegex(RuntimeError, "Rebuild it"):
                    twins.optimizer.step()

    def with_an_empty_shard(self, accelerator):
        """Twins after one step. Rank 3 has an empty shard of the first matrix."""
        twins = Twins(specs(mesh_of(4), [(S0,)], [(3, 9), (8, 8)]), foreach=False)
        twins.step()
        self.assertParity(twins)
        self.assertEqual(local(twins.params[0]).numel() == 0, self.rank == 3)
        if accelerator:
            as_on_an_accelerator(twins.optimizer)
        return twins

    def test_gradient_of_an_empty_shard_does_not_matter(self):
        for accelerator, others_have_one in itertools.product((False, True), repeat=2):
            twins = self.with_an_empty_shard(accelerator)
            twins.set_gradients([] if others_have_one else [0])
            if self.rank == 3:
                empty = torch.zeros_like(twins.params[0])
                twins.params[0].grad = None if others_have_one else empty
            twins.single.step()
            twins.optimizer.step()
            self.assertParity(twins, f"{accelerator=} {others_have_one=}")
            # On an accelerator, this looks at the statuses of the last step.
            with self.assertNoLogs("torch.optim.muon", "WARNING"):
                twins.optimizer.state_dict()

    def test_rank_of_an_empty_shard_hears_of_a_mismatch(self):
        for accelerator, lacking in ((False, 0), (True, 1), (False, 2)):
            twins = self.with_an_empty_shard(accelerator)
            twins.set_gradients()
            if self.rank in (lacking, 3):
                twins.params[0].grad = None
            with self.everywhere(f"{accelerator=} {lacking=}"):
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

    def of_four_buckets(self, ahead):
        """After one step: in each of four buckets, each rank owns one matrix."""
        twins = Twins(
            specs(mesh_of(4), [(S0,)], [(8, 8)] * 16),
            create_dtensor_config(prefetch_count=ahead),
        )
        twins.step()
        self.assertParity(twins)
        return twins

    def test_error_in_the_middle_of_a_step_leaves_nothing_in_flight(self):
        for ahead, phase, number in (
            (0, "orthogonalize", 2),
            (2, "orthogonalize", 1),
            (2, "prepare", 5),
            (1, "apply", 3),
        ):
            message = f"{ahead=} {phase} {number}"
            twins = self.of_four_buckets(ahead)
            with self.everywhere(message):
                self.break_off(twins, phase, number)
            # The group is free: other collectives do not pair up with those of the step.
            sums = torch.full((3,), float(self.rank))
            dist.all_reduce(sums, group=mesh_of(4).get_group())
            with self.everywhere(message):
                self.assertEqual(sums, torch.full((3,), 6.0))
                with self.assertRaisesRegex(RuntimeError, f"ebuild.*{phase} {number}"):
                    twins.optimizer.step()
        # A new Muon works.
        self.assertTrainsAlike(Twins(twins.specs), 1)

    def test_error_that_caused_others_is_the_one_that_is_raised(self):
        twins = self.of_four_buckets(2)
        with self.everywhere():
            self.break_off(twins, "orthogonalize", 3, broken=True)
        self.assertEqual(everyone(self.rank), [0, 1, 2, 3])

    # Frozen parameters

    def test_frozen_parameter_is_not_in_the_exchange(self):
        mesh = mesh_of(4)
        # Even shards: the traffic is the same for all owners.
        placed = specs(mesh, all_placements(mesh), [(8, 8), (4, 16)])
        expected = self.collectives_of_a_step(Twins(placed)).calls
        twins = Twins([*placed, Spec((40, 40), mesh, (S0,))])
        twins.params[-1].requires_grad_(False)
        twins.optimizer = Muon(twins.params, distributed_config=create_dtensor_config())
        before = local(twins.params[-1].detach()).clone()
        with NewtonSchulzCalls() as calls:
            seen = self.collectives_of_a_step(twins, [len(placed)])
        sent, usual = (
            sum(everyone(sum(sum(call.sent) for call in calls)))
            for calls in (seen.calls, expected)
        )
        self.assertEqual(sent, usual)
        self.assertNotIn((40, 40), calls.shapes)
        twins.single.step()
        self.assertParity(twins)
        self.assertTrue(torch.equal(local(twins.params[-1]), before))
        self.assertEqual(len(self.owner_of(twins.optimizer)), len(twins.params))


if __name__ == "__main__":
    run_tests()
