# Owner(s): ["oncall: distributed"]
"""Mistakes in a step of the distributed Muon: no rank moves anything, and all hear of them."""

import functools
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor, DTensor, Partial
from torch.optim import Muon
from torch.optim._muon import muon as functional_muon
from torch.optim._muon_engine.schedule import buckets
from torch.optim._muon_formulas import MuonFormulas
from torch.optim._muon_engine.runtime import statuses
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_config import FUNCTIONAL
from torch.testing._internal.distributed._muon.common_errors import (
    MistakesTestCase,
    parameter,
    snapshot,
)
from torch.testing._internal.distributed._muon.common_muon import (
    as_on_an_accelerator,
    Cut,
    everyone,
    full,
    grid_of,
    mesh_of,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


class TestMuonStepMistakes(MistakesTestCase):
    def test_optimizers_stepped_in_different_orders(self):
        mesh = mesh_of(4)
        pattern = "step different optimizers.*in the same order"
        for size, count, its_count in ((8, 1, 1), (4, 2, 260)):
            with self.subTest(size=size, count=count, its_count=its_count):
                spec = Spec((size, 8), mesh, (S0,))
                both = [Twins([spec] * count), Twins([spec] * its_count)]
                for twins in both:
                    twins.step()
                    self.assertParity(twins)
                before = [snapshot(twins.params) for twins in both]
                for twins in both:
                    twins.set_gradients()
                if self.rank == 2:
                    order = reversed(both)
                else:
                    order = both
                for twins in order:
                    step = twins.optimizer.step
                    self.assertRaisesEverywhere(step, RuntimeError, pattern)
                after = [snapshot(twins.params) for twins in both]
                with self.everywhere():
                    self.assertEqual(after, before)

    @mock.patch.object(statuses, "BYTES", 200)
    def test_mismatch_in_many_matrices(self):
        """Gradients need several tables if there are more of them than bytes."""
        twins = Twins([Spec((4, 4), mesh_of(4), (S0,))] * 260)
        twins.set_gradients([259] if self.rank == 1 else [])
        pattern = r"have none.* skips: parameter 259 of shape \(4, 4\)$"
        step = twins.optimizer.step
        self.assertRaisesEverywhere(step, RuntimeError, pattern)
        self.assertTrainsAlike(twins, 1)
        as_on_an_accelerator(twins.optimizer)
        twins.set_gradients([259] if self.rank == 1 else [])
        step()
        self.assertRaisesEverywhere(step, RuntimeError, pattern)

    def test_option_of_a_wrong_type(self):
        """It failed in the middle of the step, after which this optimizer did not go on."""
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)]))
        twins.step()
        for name, value in ("eps", "1e-7"), ("weight_decay", None), ("lr", -1):
            with self.subTest(name=name):
                before = snapshot(twins.params)
                right = [group[name] for group in twins.optimizer.param_groups]
                for group in twins.optimizer.param_groups:
                    group[name] = value
                twins.set_gradients()
                step = twins.optimizer.step
                self.assertRaisesEverywhere(
                    step, (TypeError, ValueError), "must|should"
                )
                with self.everywhere():
                    self.assertEqual(snapshot(twins.params), before)
                for group, original in zip(twins.optimizer.param_groups, right):
                    group[name] = original
                twins.step()
                self.assertParity(twins)

    def test_option_that_is_wrong_on_one_rank(self):
        """The others heard that it was not in their step, in all later steps. None heard of a later mismatch."""
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)]))
        twins.step()
        twins.set_gradients()
        groups, step = twins.optimizer.param_groups, twins.optimizer.step
        if self.rank == 1:
            groups[0]["eps"] = "1e-7"
        pattern = "eps must be a number|Their error says how"
        self.assertRaisesEverywhere(step, (TypeError, RuntimeError), pattern)
        groups[0]["eps"] = 1e-7
        self.assertTrainsAlike(twins, 1)
        twins.set_gradients([0] if self.rank == 2 else [])
        self.assertRaisesEverywhere(step, RuntimeError, "some have none")

    def test_parameter_groups_of_one_rank(self):
        """They have the options of the other ranks."""
        groups = [((0,), {}), ((1, 2), {})] if self.rank else None
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 3), groups=groups)
        self.assertTrainsAlike(twins, 2)

    def test_failure_at_the_end_of_a_step(self):
        """The others have made that step. They wait for this rank in the next one, until the timeout."""
        twins = Twins([Spec((8, 8), self.mesh_of_its_own("late"), (S0,))])
        late = {"side_effect": LookupError("late") if self.rank == 3 else None}
        with mock.patch.object(torch.autograd.graph, "increment_version", **late):
            self.assertRaisesEverywhere(twins.step, LookupError, "late", [3])
        twins.set_gradients()
        found = everyone(self.outcome(twins.optimizer.step))
        with self.everywhere(f"{found}"):
            # No phase was running any more.
            self.assertRegex(found[3][1], "since a step failed.*LookupError: late")
            for _, text in found[:3]:
                self.assertRegex(text, "the all-reduce of statuses, with parameter 0")

    def test_an_error_before_a_gather_names_one_matrix(self):
        """A CPU takes one matrix of a bucket after another. The other ranks fail, too, so none waits."""
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 4))
        twins.set_gradients()
        error = ArithmeticError("no")
        fails = mock.patch.object(
            MuonFormulas, "accumulate", side_effect=[None, None, error]
        )
        with fails, self.assertRaises(ArithmeticError):
            twins.optimizer.step()
        with self.everywhere():
            (note,) = error.__notes__
            self.assertRegex(note, r"step 1: gather of parameter \d of shape \(8, 8\)$")

    def test_momentum_that_does_not_fit(self):
        pattern = r"parameter 0.*momentum buffer.*\(7, 8\)"
        small = Spec((7, 8), mesh_of(4), (S0,))
        for buffer in (torch.zeros(7, 8), common_muon.place(torch.zeros(7, 8), small)):
            with self.subTest(kind=type(buffer)):
                twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)]))
                twins.step()
                state_dict = twins.optimizer.state_dict()
                state_dict["state"][0]["momentum_buffer"] = buffer
                load = functools.partial(twins.optimizer.load_state_dict, state_dict)
                self.assertRaisesEverywhere(
                    load, ValueError, r"of another model.*\(7, 8\)"
                )
                # The optimizer's own state may get it by other ways.
                twins.optimizer.state[twins.params[0]]["momentum_buffer"] = buffer
                self.assertNothingMoves(twins, RuntimeError, pattern)

    def test_placements_of_one_rank_alone(self):
        """DTensor's collective for it waited for the other ranks until the timeout."""
        mesh = mesh_of(4)

        def replicated(whole):
            return DTensor.from_local(whole, mesh, (R,), run_check=False)

        twins = Twins([Spec((8, 6), mesh, (S0,))] * 2)
        twins.step()
        pattern = (
            r"different placements.*parameter 1 of shape \(8, 6\) is usual on rank 0"
        )
        param, step = twins.params[1], twins.optimizer.step
        with self.subTest("gradient"):
            twins.set_gradients()
            if self.rank == 1:
                param.grad = replicated(torch.ones(8, 6))
            self.assertRaisesEverywhere(step, RuntimeError, pattern)
        with self.subTest("momentum"):
            twins.set_gradients()
            state = twins.optimizer.state[param]
            momentum = state["momentum_buffer"]
            if self.rank == 2:
                state["momentum_buffer"] = replicated(torch.ones(8, 6))
            self.assertRaisesEverywhere(step, RuntimeError, pattern)
            state["momentum_buffer"] = momentum
        # The ranks compare placements in each step, and these are the parameter's again.
        twins.steps -= 2
        self.assertTrainsAlike(twins, 2)

    def test_errors_that_sent_nothing_are_forgotten(self):
        twins = Twins(self.placed())
        twins.step()
        flags, group = vars(twins.config), twins.optimizer.param_groups[0]
        for where, name, wrong, pattern in (
            (flags, "prefetch_count", -1, "prefetch_count must be"),
            (flags, "prefetch_count", 3, "Set them before you build"),
            (flags, "async_gpu_parallelism", False, "Set them before"),
            (group, "ns_steps", 100, "less than 100"),
        ):
            with self.subTest(where=where, name=name, wrong=wrong):
                right, where[name] = where[name], wrong
                twins.set_gradients()
                self.assertRaisesEverywhere(twins.optimizer.step, ValueError, pattern)
                with self.everywhere():
                    with self.assertNoLogs("torch.optim.muon", "WARNING"):
                        twins.optimizer.state_dict()
                where[name] = right
                twins.optimizer.step()
                twins.single.step()
                self.assertParity(twins, name)

    def test_statuses_through_memory_of_the_host(self):
        """As on accelerators, whose table of statuses comes from pinned memory and returns there."""
        twins = Twins(common_muon.specs(mesh_of(4), [(S0,)], [(8, 6), (8, 6)]))
        side_channel = twins.optimizer._engine._make_runner().side_channel
        (statuses,) = side_channel.statuses
        statuses._host = torch.zeros_like(statuses._table)
        statuses._has_host_copy = True
        stream = mock.Mock()
        with mock.patch.object(
            torch.accelerator, "current_stream", return_value=stream
        ):
            twins.set_gradients()
            twins.optimizer.step()
            self.assertTrue(stream.record_event.called)
            twins.set_gradients((1,) if self.rank == 2 else ())
            self.assertRaisesEverywhere(
                twins.optimizer.step, RuntimeError, "some have none.*parameter 1"
            )

    def test_mismatch_is_said_once(self):
        """On a CPU, the step has raised it, and moved nothing. A checkpoint can be made."""
        twins = Twins(self.placed())
        twins.step()
        twins.set_gradients(missing=[0] if self.rank == 1 else ())
        step = twins.optimizer.step
        self.assertRaisesEverywhere(step, RuntimeError, "some have none")
        with self.everywhere():
            twins.optimizer.state_dict()

    def test_gradient_of_another_kind(self):
        """A functional step of two sharded matrices. Rank 1 has another gradient for the second one."""
        usual = torch.ones(4, 8)
        for other, own in (
            (usual.to_sparse(), "sparse gradients"),
            (torch.ones(5, 8), r"has shape \(4, 8\), but its gradient \(5, 8\)"),
            (usual.to("meta"), "is on cpu, but its gradient meta"),
            (usual.to(torch.complex64), "is complex False, but its gradient True"),
        ):
            with self.subTest(other=other):
                config = create_auto_config(fsdp_process_group=dist.group.WORLD)
                params, momenta = (
                    [full(index, (4, 8)) for index in range(2)] for _ in range(2)
                )
                grads = [usual, other if self.rank == 1 else usual]
                problem = own if self.rank == 1 else "it cannot use"
                pattern = rf"^(?=.*{problem}).*parameter 1 of shape \("
                options = {**FUNCTIONAL, "distributed_config": config}
                step = functools.partial(
                    functional_muon, params, grads, momenta, **options
                )
                self.assertRaisesEverywhere(step, RuntimeError, pattern)

    def test_ranks_that_replaced_different_parameters(self):
        """Momentum restarted for different parameters, so replicas got different updates."""
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        twins = Twins([Cut((8, 8)), Cut((12, 5)), Cut((8, 8))], config)
        twins.step()
        replaced = 0 if self.rank == 0 else 1
        former = twins.params[replaced]
        twins.params[replaced] = nn.Parameter(former.detach().clone())
        twins.optimizer.param_groups[0]["params"] = list(twins.params)
        self.assertNothingMoves(twins, ValueError, "parameter 0 .*replaced is")


class TestMuonReplicas(MistakesTestCase):
    """Replicas whose values differ, from the start or since a checkpoint."""

    def replicas(self):
        """Parameters of equal shapes, with gradients, under DDP. Rank 2 has other values."""
        params = self.whole((4, 6), (5, 3))
        if self.rank == 2:
            params[1].data += 1
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        self.give_gradients(params)
        return Muon(params, distributed_config=config)

    def test_replicas_with_other_values(self):
        """A step that raised another error had moved nothing, and the next one no longer compared the values."""
        for max_replicas in (1, 4):
            with self.subTest(max_replicas=max_replicas):
                with mock.patch.object(buckets, "MAX_REPLICAS", max_replicas):
                    muon = self.replicas()
                group = muon.param_groups[0]
                lr, group["lr"] = group["lr"], 0.1 + self.rank
                self.assertRaisesEverywhere(muon.step, RuntimeError, "hyperparameters")
                group["lr"] = lr
                pattern = r"different values.*ZeroRedundancyOptimizer.*: parameter 1 of shape \(5, 3\)$"
                for _ in range(2):
                    self.assertRaisesEverywhere(muon.step, RuntimeError, pattern)

    def test_replicas_of_shards(self):
        """Ranks 2 and 3 have the rows of ranks 0 and 1 in another order."""
        values = distribute_tensor(full(0, (8, 6)), grid_of(2, 2), [R, S0])
        if self.rank > 1:
            values.to_local().copy_(values.to_local().flip(0))
        param = nn.Parameter(values)
        param.grad = torch.ones_like(values)
        muon = Muon([param], distributed_config="auto")
        self.assertRaisesEverywhere(muon.step, RuntimeError, "different values")

    def test_values_of_a_model_that_a_checkpoint_fills(self):
        """torch.distributed.checkpoint makes momentum by a step of zeros with a learning rate of zero."""
        muon = self.replicas()
        params = muon.param_groups[0]["params"]
        get_optimizer_state_dict(nn.ParameterList(params), muon)
        for index, param in enumerate(params):
            param.data.copy_(full(index, param.shape))
        self.give_gradients(params)
        with self.everywhere():
            muon.step()
        sums = everyone(params[1].sum().item())
        self.assertEqual(len(set(sums)), 1)

    def test_values_are_compared_when_they_first_move(self):
        """Ranks that held different further groups compared different things."""
        two = DeviceMesh("cpu", [0, 1])
        params = []
        # Ranks 2 and 3 hold none of the second group.
        meshes = [mesh_of(4), mesh_of(4)]
        if self.rank < 2:
            meshes += [two, two]
        for index, mesh in enumerate(meshes):
            value = distribute_tensor(full(index, (4, 6)), mesh, [R])
            params.append(nn.Parameter(value))
            params[index].grad = torch.ones_like(value)
        still = {"params": params[:2], "lr": 0.0, "weight_decay": 0.0}
        muon = Muon([still, {"params": params[2:]}], lr=0.1, distributed_config="auto")
        with self.everywhere():
            muon.step()
        if self.rank == 3:
            params[1].data.to_local().add_(1)
        muon.param_groups[0]["lr"] = 0.1
        pattern = "different values.*: parameter 1 of shape"
        self.assertRaisesEverywhere(muon.step, RuntimeError, pattern)


class TestMuonFusedGradients(common_muon.OnCPU):
    """A fused weight has one gradient, whatever its parts."""

    def assertRefusedWithoutGradient(self, spec, split, **options):
        twins = Twins([spec], groups=[((0,), {"split": split})], **options)
        twins.step()
        twins.set_gradients()
        before = snapshot(twins.params)
        gradient = twins.params[0].grad
        if self.rank == 1:
            twins.params[0].grad = None
        step = twins.optimizer.step
        self.assertRaisesEverywhere(
            step, RuntimeError, "some have none.*more of its parts"
        )
        with self.everywhere():
            self.assertEqual(snapshot(twins.params), before)
        twins.params[0].grad = gradient
        twins.single.step()
        twins.optimizer.step()
        self.assertParity(twins)

    def test_gradient_that_one_rank_lacks(self):
        """Each part was whole on one rank, so the parts of the other ranks moved."""
        for split in ((4, 4, 4, 4), (10, 6), {"sizes": (1, 3), "repeats": 4}):
            with self.subTest(split=split):
                self.assertRefusedWithoutGradient(
                    Spec((16, 8), mesh_of(4), (S0,)), split
                )
        columns = {"sizes": (2, 2, 2, 2), "dim": 1}
        self.assertRefusedWithoutGradient(Spec((16, 8), mesh_of(4), (S1,)), columns)

    def test_no_rank_has_one(self):
        spec = Spec((16, 8), mesh_of(4), (S0,))
        twins = Twins([spec, spec], groups=[((0, 1), {"split": (4, 4, 4, 4)})])
        self.assertTrainsAlike(twins, 3, missing=lambda step: [step % 2])

    def test_many_parts_have_one_status(self):
        spec = Spec((2400, 2), mesh_of(4), (S0,))
        twins = Twins([spec], groups=[((0,), {"split": [2] * 1200})])
        (statuses,) = twins.optimizer._engine._make_runner().side_channel.statuses
        with self.everywhere():
            self.assertEqual(len(statuses.gradients), 1)


class TestMuonUnreadErrors(common_muon.OnCPU):
    """On accelerators, the host reads a mismatch later than the step. Nothing may lose it until then."""

    def twins(self, placement=S0):
        """Twins after a step."""
        twins = Twins(specs(mesh_of(4), [(placement,)], [(8, 8)] * 4), foreach=False)
        twins.step()
        as_on_an_accelerator(twins.optimizer)
        return twins

    def mismatched(self):
        """Twins after a step in which rank 1 had no gradient of parameter 0."""
        twins = self.twins()
        twins.set_gradients(missing=(0,) if self.rank == 1 else ())
        twins.optimizer.step()
        return twins

    def test_mismatch_before_a_change(self):
        saved = self.mismatched().optimizer
        # Only the state of the last step is unread.
        with mock.patch.object(type(saved._engine), "synchronize"):
            state = saved.state_dict()
        more = {"params": [parameter(Spec((6, 6), mesh_of(4), (S0,)))]}
        for first, change in (
            (lambda muon, last: last.requires_grad_(False), Muon.step),
            (lambda muon, last: None, lambda muon: muon.add_param_group(more)),
            (lambda muon, last: muon.load_state_dict(state), Muon.synchronize),
        ):
            with self.subTest(first=first, change=change):
                twins = self.mismatched()
                muon = twins.optimizer
                first(muon, twins.params[2])
                twins.set_gradients()
                pattern = "some have none.*parameter 0"
                self.assertRaisesEverywhere(lambda: change(muon), RuntimeError, pattern)
                self.assertEqual(len(muon.param_groups), 1)
                pattern = "[Rr]ebuild.*parameter 0"
                self.assertRaisesEverywhere(muon.step, RuntimeError, pattern)

    def test_rank_without_a_gradient_sends_defined_values(self):
        """Values from before in the same memory came into parameters once."""
        for layout, missing in itertools.product((S0, S1, R), (0, 1, 2, 3)):
            with self.subTest(layout=layout, missing=missing):
                twins = self.twins(layout)
                storages = twins.optimizer._engine._runner.memory._storages
                for storage, nbytes in storages:
                    memory = torch.tensor([], dtype=torch.uint8)
                    # Bytes of 255 are NaN.
                    memory.set_(storage, 0, (nbytes,)).fill_(255)
                twins.set_gradients(missing=range(4) if self.rank == missing else ())
                twins.optimizer.step()
                with self.everywhere(f"{layout} {missing}"):
                    for param in twins.params:
                        self.assertTrue(common_muon.local(param).isfinite().all())

    def test_gradient_that_this_rank_cannot_use(self):
        """A rank that raised alone, before it took part, would leave the others waiting."""
        functions = create_dtensor_config()
        common_muon.wrap_functions(functions, "gather_fn")
        own = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)] * 4), functions)
        for twins in (self.twins(), own):
            with self.subTest(functions=twins.config is functions):
                twins.set_gradients()
                if self.rank == 1:
                    twins.params[0]._grad = torch.ones(8, 8).to_sparse()
                step = twins.optimizer.step
                self.assertRaisesEverywhere(
                    step, RuntimeError, "parameter 0.*sparse", [1]
                )

    def test_gradient_that_only_its_own_rank_would_need(self):
        """No other rank has the matrix. All have another one, whose gather would wait for this rank."""
        shared = parameter(Spec((8, 8), mesh_of(4), (S0,)))
        alone = nn.Parameter(torch.ones(4, 8))
        optimizer = Muon([shared, alone], distributed_config="auto")
        shared.grad, alone.grad = torch.ones_like(shared), torch.ones(4, 8)
        if self.rank == 1:
            alone._grad = torch.ones(4, 8).to_sparse()
        before = snapshot([shared, alone])
        text = "parameter 1 .*sparse" if self.rank == 1 else "Their error says how"
        self.assertRaisesEverywhere(optimizer.step, RuntimeError, text)
        self.assertEqual(snapshot([shared, alone]), before)

    def test_gradient_that_a_larger_group_needs(self):
        """Ranks of a smaller group with rank 1 were told that they do not hold the matrix."""
        placed = [Spec((8, 8), mesh_of(size), (S0,)) for size in (4, 2)]
        twins = Twins(placed)
        twins.set_gradients()
        if self.rank == 1:
            twins.params[0]._grad = torch.ones(8, 8).to_sparse()
        step = twins.optimizer.step
        self.assertRaisesEverywhere(step, RuntimeError, r"parameter 0\b")

    def test_replicas_that_do_not_move(self):
        """Only the ranks that share them wait in each step. They waited for a rank that had gone on."""
        placed = [Spec((8, 8), mesh_of(4), (S0,)), Spec((8, 8), mesh_of(2), (R,))]
        still = ((1,), {"lr": 0.0, "weight_decay": 0.0})
        twins = Twins(placed, groups=[((0,), {}), still])
        as_on_an_accelerator(twins.optimizer)
        for _ in range(2):
            twins.step()
        self.assertParity(twins)
        if self.rank == 3:
            twins.optimizer.param_groups[0]["lr"] = 0.5
        twins.set_gradients()
        twins.optimizer.step()
        step = twins.optimizer.step
        self.assertRaisesEverywhere(step, RuntimeError, "different hyperparameters")

    def test_partial_gradient_on_some_ranks_only(self):
        """DTensor's collective for the gradient waited for the rank without one."""
        spec = Spec((8, 8), mesh_of(4), (R,))
        param = parameter(spec)
        optimizer = Muon([param], distributed_config="auto")
        for missing in ((), (2,), (), (0, 1)):
            with self.subTest(missing=missing):
                ones = torch.ones(8, 8)
                grad = DTensor.from_local(
                    ones, spec.mesh, (Partial(),), run_check=False
                )
                param.grad = None if self.rank in missing else grad
                before = snapshot([param])
                if not missing:
                    optimizer.step()
                    self.assertNotEqual(snapshot([param]), before)
                    continue
                self.assertRaisesEverywhere(
                    optimizer.step, RuntimeError, "some have none"
                )
                with self.everywhere():
                    self.assertEqual(snapshot([param]), before)

    def test_functional_form_with_momentum_of_another_placement(self):
        """Its momentum restarted in every call."""
        param = parameter(Spec((8, 8), mesh_of(4), (S0,))).detach()
        buffer = common_muon.place(torch.zeros(8, 8), Spec((8, 8), mesh_of(4), (R,)))
        options = {**FUNCTIONAL, "distributed_config": create_dtensor_config()}
        step = functools.partial(functional_muon, [param], [param], [buffer], **options)
        self.assertRaisesEverywhere(step, ValueError, r"bufs\[0\].*placement")

    def test_functional_form_leaves_the_next_optimizers_owners(self):
        options = {**FUNCTIONAL, "distributed_config": create_dtensor_config()}
        owners = []
        for calls in (0, 3):
            params = [parameter(Spec((8, 8), mesh_of(4), (S0,))) for _ in range(2)]
            for _ in range(calls):
                values = [param.detach().clone() for param in params]
                functional_muon(values, values, values, **options)
            muon = Muon(params, distributed_config="auto")
            owners.append(muon.matrix_owners[0, 0])
        # Each of the two optimizers has two matrices.
        self.assertEqual((owners[1] - owners[0]) % 4, 2, f"{owners}")


if __name__ == "__main__":
    run_tests()
