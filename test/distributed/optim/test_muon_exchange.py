# Owner(s): ["oncall: distributed"]
"""What a step of the distributed Muon computes, sends and keeps: nothing twice, nothing in vain."""

import contextlib
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import _muon, Muon
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
from torch.utils.flop_counter import FlopCounterMode


class WatchedWork:
    """The handle of a collective; notes whether somebody waited for it.

    A handle that ``broke`` still waits, and then raises.
    """

    def __init__(self, work):
        self.work = work
        self.waits = 0
        self.broke = False

    def wait(self):
        self.waits += 1
        self.work.wait()
        if self.broke:
            raise RuntimeError("connection lost")


@contextlib.contextmanager
def watched_collectives():
    """The handles of all that is exchanged from here on."""
    works, original = [], dist.all_to_all_single

    def watched(*args, **kwargs):
        works.append(WatchedWork(original(*args, **kwargs)))
        return works[-1]

    with mock.patch.object(dist, "all_to_all_single", watched):
        yield works


def as_on_an_accelerator(optimizer):
    """Has ``optimizer`` go on as one whose tensors are on an accelerator.

    Its first step is over, so that its buffers, which are on the CPU, are there. What then differs is
    that mismatches are looked at in the next step, and that a bucket's gradients are taken in together.
    """
    engine = optimizer._engine
    engine.device = engine.pipeline.device = torch.device("cuda")


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
            per_rank = everyone(calls.shapes)
            self.assertEqual(
                sorted(s for shapes in per_rank for s in shapes),
                sorted(spec.shape for spec in twins.specs),
            )
            for rank, shapes in enumerate(per_rank):
                owned = twins.optimizer.assignments[rank]
                self.assertEqual(
                    sorted(shapes), sorted(twins.specs[i].shape for i in owned)
                )

    def test_hsdp_orthogonalizes_once_and_not_per_replica(self):
        grid = grid_of(2, 2)
        twins = Twins(specs(grid, [(R, S0)], [(8, 8)] * 4))
        twins.set_gradients()
        with NewtonSchulzCalls() as calls:
            twins.optimizer.step()
        self.assertEqual(everyone(len(calls.shapes)), [1] * 4)

    def test_flops_are_those_of_one_process(self):
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (16, 24), (24, 16)]
        grid = grid_of(2, 2)
        twins = Twins(specs(grid, all_placements(grid), shapes))
        twins.set_gradients()
        with FlopCounterMode(display=False) as counter:
            twins.optimizer.step()
        expected = 0
        for spec in twins.specs:
            short, long = sorted(spec.shape)
            expected += 5 * (2 * 2 * short * short * long + 2 * short**3)
        self.assertEqual(sum(everyone(counter.get_total_flops())), expected)

    def test_work_is_balanced(self):
        grid = grid_of(2, 2)
        twins = Twins(specs(grid, [(R, S0), (S0, S1)], [(24, 24)] * 4 + [(8, 8)] * 4))
        twins.set_gradients()
        with FlopCounterMode(display=False) as counter:
            twins.optimizer.step()
        flops = everyone(counter.get_total_flops())
        self.assertEqual(flops, [flops[0]] * 4)

    # Bytes

    def expected_traffic(self, twins, mesh_shape):
        """Elements that each rank has to send each other rank, from the placements alone.

        Each element enters its owner once, from the owner's own replica, and each rank receives the
        elements that it holds once. For each matrix a flag travels with it, there and back.
        """
        world = self.world_size
        traffic = [[0] * world for _ in range(world)]
        owner_of = self.owner_of(twins.optimizer)
        for i, spec in enumerate(twins.specs):
            holdings = everyone(sorted(held(spec)))
            owner = owner_of[i]
            replica = self.replica_of(spec, owner)
            for rank in range(world):
                if rank == owner:
                    continue
                traffic[rank][owner] += 1
                traffic[owner][rank] += 1 + len(holdings[rank])
                if self.replica_of(spec, rank) == replica:
                    missing = set(holdings[rank]) - set(holdings[owner])
                    traffic[rank][owner] += len(missing)
        return traffic

    def replica_of(self, spec, rank):
        place = (spec.mesh.mesh == rank).nonzero()[0].tolist()
        return [c for c, p in zip(place, spec.placements) if p.is_replicate()]

    def check_traffic(self, twins):
        twins.set_gradients()
        with Collectives() as seen:
            twins.optimizer.step()
        mine = [0] * self.world_size
        for call in seen.calls:
            self.assertEqual(call.itemsize, 2)
            for peer, elements in zip(call.ranks, call.sent):
                mine[peer] += elements
        self.assertEqual(everyone(mine), self.expected_traffic(twins, None))

    def test_bytes_sent_are_what_the_placements_need(self):
        mesh = mesh_of(4)
        shapes = [(8, 8), (7, 5), (3, 9), (1, 8), (16, 24)]
        self.check_traffic(Twins(specs(mesh, all_placements(mesh), shapes)))

    def test_bytes_sent_on_a_2d_mesh(self):
        grid = grid_of(2, 2)
        for placements in all_placements(grid):
            self.check_traffic(
                Twins(specs(grid, [placements], [(8, 8), (7, 5), (3, 9), (16, 24)]))
            )

    def test_bytes_sent_do_not_depend_on_prefetch(self):
        mesh = mesh_of(4)
        for prefetch, parallel in [(0, True), (4, True), (0, False)]:
            self.check_traffic(
                Twins(
                    specs(mesh, all_placements(mesh)),
                    create_dtensor_config(parallel, prefetch),
                )
            )

    def test_bytes_of_wide_parameters_travel_rounded(self):
        mesh = mesh_of(4)
        for dtype in (torch.float64, torch.bfloat16):
            self.check_traffic(Twins(specs(mesh, [(S0,), (R,)], dtype=dtype)))

    # Collectives

    def collectives_of_a_step(self, twins, missing=()):
        twins.set_gradients(missing)
        with Collectives() as seen:
            twins.optimizer.step()
        return seen

    def test_two_collectives_a_round_and_no_others(self):
        mesh = mesh_of(4)
        for prefetch in (0, 1, 3):
            twins = Twins(
                specs(mesh, [(S0,), (S1,), (R,)], [(8, 8)] * 8),
                create_dtensor_config(prefetch_count=prefetch),
            )
            for _ in range(2):
                names = self.collectives_of_a_step(twins).names()
                self.assertEqual(set(names), {("alltoall_base_", (0, 1, 2, 3))})
                # Six matrices an owner fit into a few rounds.
                self.assertEqual(len(names) % 2, 0)
                self.assertGreaterEqual(len(names), 4)
                self.assertLessEqual(len(names), 8)

    def test_one_round_where_every_rank_owns_one_matrix(self):
        mesh = mesh_of(4)
        twins = Twins(specs(mesh, [(S0,)], [(8, 8)] * 4))
        self.assertEqual(len(self.collectives_of_a_step(twins).calls), 2)

    def test_one_rank_needs_no_collective(self):
        twins = Twins(specs(mesh_of(1), [(S0,), (R,)]))
        self.assertEqual(self.collectives_of_a_step(twins).calls, [])

    def test_all_ranks_make_the_same_calls_with_and_without_gradients(self):
        twins = Twins(self.placed())
        usual = self.collectives_of_a_step(twins)
        self.assertEqual(everyone(usual.names()), [usual.names()] * 4)
        for missing in ([0], range(0, len(twins.params), 3), range(len(twins.params))):
            now = self.collectives_of_a_step(twins, missing)
            self.assertEqual(now.calls, usual.calls)

    def test_calls_are_the_same_where_ranks_disagree_about_gradients(self):
        twins = Twins(self.placed())
        usual = self.collectives_of_a_step(twins)
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
            _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)
        # The matrix itself is put together for it.
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
            # A round is one gather and one scatter; the largest of each are no less than it.
            bound = (twins.config.prefetch_count + 2) * sum(sizes[-2:]) + largest
            # What is blended is made in the parameter's own dtype, one piece at a time.
            bound += max(local(param).nbytes for param in twins.params)
            if twins.steps == 1:
                bound += momentum
            problems = []
            if not bytes_alive.peak:
                problems.append("no bytes seen")
            if bytes_alive.peak > bound:
                problems.append(f"{bytes_alive.peak} bytes alive, bound {bound}")
            self.assertEverywhere(problems, f"step {twins.steps}")

    def test_memory_stays_within_the_rounds_in_flight(self):
        mesh = mesh_of(4)
        shapes = [(64, 96)] * 16
        for placement in (S0, S1, R):
            for prefetch in (0, 1, 2):
                twins = Twins(
                    specs(mesh, [(placement,)], shapes),
                    create_dtensor_config(prefetch_count=prefetch),
                    foreach=False,
                )
                self.check_memory(twins, shapes[:1])

    def test_memory_does_not_grow_with_the_number_of_shapes(self):
        mesh = mesh_of(4)
        shapes = [(64, 64 + 8 * i) for i in range(16)]
        for placement in (S0, S1, R):
            for prefetch in (0, 1, 2):
                twins = Twins(
                    specs(mesh, [(placement,)], shapes),
                    create_dtensor_config(prefetch_count=prefetch),
                    foreach=False,
                )
                self.check_memory(twins, shapes[-1:])

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
            # All buffers are there, so that checkpoints are alike on all ranks.
            buffer = local(twins.optimizer.state[param]["momentum_buffer"])
            if buffer.numel():
                self.assertEqual(bool(buffer.any()), i not in missing)
            if i in missing:
                start = full(twins.seed + i, twins.specs[i].shape)
                self.assertTrue(
                    torch.equal(local(param), piece_of(start, twins.specs[i]))
                )
        total = sum(everyone(len(calls.shapes)))
        self.assertEqual(total, len(twins.params) - len(missing))

    def test_first_gradient_late_and_gone_again(self):
        twins = Twins(self.placed())
        n = len(twins.params)
        absent = [range(n), range(0, n, 2), range(1, n, 2), (), range(5, n), ()]
        self.assertTrainsAlike(twins, len(absent), missing=absent.__getitem__)

    def test_gradient_on_some_holders_only_is_an_error_on_every_holder(self):
        for lacking in (0, 3):
            for placement in (S0, S1, R):
                names = ["first.weight", "expert.weight", "last.weight"]
                mesh = mesh_of(4)
                params = [
                    torch.nn.Parameter(
                        place(full(i, (8, 8)), Spec((8, 8), mesh, (placement,)))
                    )
                    for i in range(3)
                ]
                optimizer = Muon(
                    list(zip(names, params)),
                    distributed_config=create_dtensor_config(),
                )
                for i, param in enumerate(params):
                    if i != 1 or self.rank != lacking:
                        param.grad = torch.ones_like(param)
                with self.assertRaisesRegex(
                    RuntimeError, r"parameter 1 'expert\.weight' of shape \(8, 8\)"
                ) as raised:
                    optimizer.step()
                self.assertNotIn("first.weight", str(raised.exception))
                self.assertNotIn("last.weight", str(raised.exception))
                self.assertEqual(
                    everyone(str(raised.exception)), [str(raised.exception)] * 4
                )
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
        # Of one size, so that whatever is exchanged fits.
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 8))
        twins.step()
        self.assertParity(twins)
        twins.set_gradients()
        if self.rank == 2:
            # The others do not make this one.
            with contextlib.suppress(KeyError):
                twins.optimizer.step({}.popitem)
        with self.everywhere():
            # Seen once the last bucket is through, so that parameters have moved by then.
            with self.assertRaisesRegex(RuntimeError, "not in the same step"):
                twins.optimizer.step()
            with self.assertRaisesRegex(RuntimeError, "[Rr]ebuild.*same step"):
                twins.optimizer.step()

    def test_mismatches_on_an_accelerator_are_seen_in_the_next_step(self):
        # A step does not wait for the device to hear what others have.
        grid = grid_of(2, 2)
        placed = specs(grid, [(S0, R), (S0, S1)], [(8, 8), (16, 12), (9, 7)])
        for look in (lambda o: o.step(), lambda o: o.state_dict()):
            twins = Twins(placed, weight_decay=0.2, foreach=False)
            twins.step()
            as_on_an_accelerator(twins.optimizer)
            missing = [(), (1,), (1,), ()]
            self.assertTrainsAlike(twins, 4, missing=lambda i: missing[i])
            twins.set_gradients(missing=(0,) if dist.get_rank() == 1 else ())
            with self.everywhere():
                with self.assertNoLogs("torch.optim.muon", "WARNING"):
                    twins.optimizer.step()
                with self.assertRaisesRegex(RuntimeError, r"parameter 0.* \(8, 8\)"):
                    look(twins.optimizer)
                # Raised once, it is told and not raised again to whom saves what there is.
                with self.assertLogs("torch.optim.muon", "WARNING") as seen:
                    twins.optimizer.state_dict()
                self.assertRegex(seen.output[0], r"parameter 0.* \(8, 8\)")
                with self.assertRaisesRegex(RuntimeError, "Rebuild it"):
                    twins.optimizer.step()

    def with_an_empty_shard(self, accelerator):
        """The last of four ranks holds nothing of the first matrix. One step has been made."""
        mesh = mesh_of(4)
        twins = Twins(specs(mesh, [(S0,)], [(3, 9), (8, 8)]), foreach=False)
        twins.step()
        self.assertParity(twins)
        self.assertEqual(local(twins.params[0]).numel() == 0, self.rank == 3)
        if accelerator:
            as_on_an_accelerator(twins.optimizer)
        return twins

    def test_empty_shard_needs_no_gradient(self):
        for accelerator in (False, True):
            twins = self.with_an_empty_shard(accelerator)
            for _ in range(3):
                twins.set_gradients()
                if self.rank == 3:
                    twins.params[0].grad = None
                twins.single.step()
                twins.optimizer.step()
                self.assertParity(twins, f"{accelerator=}")
            # On an accelerator the last step is looked at here.
            with self.assertNoLogs("torch.optim.muon", "WARNING"):
                twins.optimizer.state_dict()

    def test_empty_shard_may_have_a_gradient_that_the_others_lack(self):
        for accelerator in (False, True):
            twins = self.with_an_empty_shard(accelerator)
            for _ in range(3):
                twins.set_gradients([0])
                if self.rank == 3:
                    twins.params[0].grad = torch.zeros_like(twins.params[0])
                twins.single.step()
                twins.optimizer.step()
                self.assertParity(twins, f"{accelerator=}")
            twins.optimizer.state_dict()

    def test_rank_of_an_empty_shard_hears_of_a_mismatch(self):
        for accelerator, lacking in itertools.product((False, True), (0, 1, 2)):
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
        """Call ``number`` of ``phase`` raises, on all ranks alike, while collectives are in flight.

        With ``broken``, whoever waits for these gets an error.
        """
        original, calls = getattr(_muon._MuonFormulas, phase), []
        in_flight = []

        def fail(formulas, *args, **kwargs):
            calls.append(phase)
            if len(calls) == number:
                in_flight.extend(work for work in works if not work.waits)
                for work in in_flight if broken else ():
                    work.broke = True
                raise LookupError(f"{phase} {number}")
            return original(formulas, *args, **kwargs)

        twins.set_gradients()
        with watched_collectives() as works:
            with mock.patch.object(_muon._MuonFormulas, phase, fail):
                with self.assertRaisesRegex(LookupError, f"^{phase} {number}$"):
                    twins.optimizer.step()
        self.assertGreater(len(in_flight), 0)
        # Waited for, each of them once.
        self.assertEqual([work.waits for work in works], [1] * len(works))
        for bucket in twins.optimizer._engine.pipeline.buffers.buckets:
            self.assertIsNone(bucket.work)

    def of_four_buckets(self, ahead):
        """In each of four buckets each rank owns one matrix. One step has been made."""
        twins = Twins(
            specs(mesh_of(4), [(S0,)], [(8, 8)] * 16),
            create_dtensor_config(prefetch_count=ahead),
        )
        twins.step()
        self.assertParity(twins)
        self.assertIn("16 matrices in 4 buckets", twins.optimizer.describe())
        return twins

    def test_error_in_the_middle_of_a_step_leaves_nothing_in_flight(self):
        for ahead, phase, number in (
            (0, "orthogonalize", 2),
            (2, "orthogonalize", 1),
            (2, "orthogonalize", 3),
            (2, "prepare", 5),
            (1, "apply", 3),
        ):
            message = f"{ahead=} {phase} {number}"
            twins = self.of_four_buckets(ahead)
            with self.everywhere(message):
                self.break_off(twins, phase, number)
            # The group is free for others: what they send meets nothing of the step.
            sums = torch.full((3,), float(self.rank))
            dist.all_reduce(sums, group=mesh_of(4).get_group())
            with self.everywhere(message):
                self.assertEqual(sums, torch.full((3,), 6.0))
                with self.assertRaisesRegex(RuntimeError, f"ebuild.*{phase} {number}"):
                    twins.optimizer.step()
        # And for a Muon that takes the failed one's place.
        self.assertTrainsAlike(Twins(twins.specs), 1)

    def test_error_that_led_to_others_is_the_one_to_hear_of(self):
        for ahead in (0, 2):
            twins = self.of_four_buckets(ahead)
            with self.everywhere(f"{ahead=}"):
                self.break_off(twins, "orthogonalize", 3, broken=True)
            self.assertEqual(everyone(self.rank), [0, 1, 2, 3])

    def test_frozen_parameter_is_not_in_the_exchange(self):
        mesh = mesh_of(4)
        placed = specs(mesh, all_placements(mesh), [(8, 8), (7, 5)])
        expected = self.collectives_of_a_step(Twins(placed)).calls
        frozen = Spec((40, 40), mesh, (S0,))
        twins = Twins([*placed, frozen])
        config = create_dtensor_config()
        twins.params[-1].requires_grad_(False)
        twins.optimizer = Muon(twins.params, distributed_config=config)
        before = twins.params[-1].detach().to_local().clone()
        with NewtonSchulzCalls() as calls:
            seen = self.collectives_of_a_step(twins, [len(placed)])
        self.assertEqual(
            sum(sum(c.sent) for c in seen.calls), sum(sum(c.sent) for c in expected)
        )
        self.assertNotIn((40, 40), calls.shapes)
        twins.single.step()
        self.assertParity(twins)
        self.assertTrue(torch.equal(local(twins.params[-1]), before))
        owned = [i for own in twins.optimizer.assignments.values() for i in own]
        self.assertEqual(sorted(owned), list(range(len(twins.params))))

    def test_parameter_unfrozen_later(self):
        mesh = mesh_of(4)
        twins = Twins(specs(mesh, all_placements(mesh), [(8, 8), (7, 5)]))
        for which in (0, 3):
            twins.params[which].requires_grad_(False)
        twins.optimizer = Muon(twins.params, distributed_config=create_dtensor_config())
        for step in range(4):
            if step == 2:
                for which in (0, 3):
                    twins.params[which].requires_grad_(True)
            twins.step([0, 3] if step < 2 else [])
            self.assertParity(twins, f"step {step}")

    def test_parameter_frozen_later(self):
        mesh = mesh_of(4)
        twins = Twins(specs(mesh, all_placements(mesh), [(8, 8), (7, 5)]))
        for step in range(3):
            if step == 1:
                twins.params[1].grad = None
                twins.params[1].requires_grad_(False)
            twins.step([1] if step else [])
            self.assertParity(twins, f"step {step}")


if __name__ == "__main__":
    run_tests()
