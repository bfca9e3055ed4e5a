# Owner(s): ["oncall: distributed"]
"""Mistakes around the distributed Muon: which ranks hear of them, how often, and that none waits for ever."""

import contextlib
import dataclasses
import functools
import itertools
import re
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, DTensor, Partial
from torch.optim import Muon
from torch.optim._muon import muon as functional_muon
from torch.optim._muon_reports import hints
from torch.optim._muon_engine.building import Setting
from torch.optim._muon_engine.runtime import transport
from torch.optim._muon_engine.schedule import buckets, division
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    partition_named_parameters,
    partition_parameters,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_config import FUNCTIONAL
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
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import OTHER


# The options that ranks compare, with valid values that are not the defaults.
OTHER_OPTIONS = {**OTHER, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}


def parameter(spec, seed=0):
    return nn.Parameter(common_muon.place(full(seed, spec.shape, spec.dtype), spec))


def snapshot(params):
    return [common_muon.local(p.detach()).clone() for p in params]


class TestMuonMistakes(common_muon.OnCPU):
    def build(self, placed, change=None, named=True, group=None, **options):
        """Makes an optimizer; ``change`` gets the list of (name, parameter) pairs."""
        pairs = [(f"w{i}", parameter(spec, i)) for i, spec in enumerate(placed)]
        if change is not None:
            pairs = change(pairs)
        options.setdefault("distributed_config", create_dtensor_config())
        self.before = [p.detach() for _, p in pairs]
        params = pairs if named else [p for _, p in pairs]
        return Muon([{"params": params, **(group or {})}], **options)

    def assertRefused(self, kind, pattern, placed=None, **options):
        placed = self.placed() if placed is None else placed
        build = functools.partial(self.build, placed, **options)
        self.assertRaisesEverywhere(build, kind, pattern)

    def outcomes(self, placed, **options):
        """How many optimizers each rank builds, and its error: then, or else in the first step.

        Nothing moves.
        """
        built = []
        outcome = self.outcome(lambda: built.append(self.build(placed, **options)))
        dist.barrier()
        for optimizer in built:
            before = snapshot(self.before)
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
            outcome = self.outcome(optimizer.step)
            self.assertEqual(snapshot(self.before), before)
        return everyone((len(built), outcome))

    def mesh_of_its_own(self, name, ranks=None):
        """A mesh over a new group, which a test may break. DTensor's caches know meshes by their names."""
        group = dist.new_group(ranks, timeout=timedelta(seconds=2))
        if ranks is not None and self.rank not in ranks:
            return None
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))

    def meshes_of_pairs(self, *pairs):
        """This rank's meshes of their own among those of ``pairs``."""
        meshes = [self.mesh_of_its_own(f"{pair} of {pairs}", pair) for pair in pairs]
        return [mesh for mesh in meshes if mesh is not None]

    def placed(self):
        return specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])

    def assertNothingMoves(self, twins, kind, pattern):
        """The next step raises on all ranks."""
        twins.set_gradients()
        before = snapshot(twins.params)
        self.assertRaisesEverywhere(twins.optimizer.step, kind, pattern)
        with self.everywhere():
            self.assertEqual(snapshot(twins.params), before)

    def test_different_parameters(self):
        for field, value, pattern in [
            ("shape", (7, 6), r"shape is \(7, 5\) on rank 0 and \(7, 6\) on rank 2"),
            ("dtype", torch.bfloat16, "dtype is torch.float32 on rank 0"),
            ("placements", (S1,), "rank 0.*rank 2"),
        ]:
            placed = self.placed()
            if self.rank == 2:
                placed[1] = placed[1]._replace(**{field: value})
            self.assertRefused(ValueError, f"parameter 1 'w1'.*{pattern}", placed)
        placed = self.placed()[self.rank == 3 :]
        self.assertRefused(ValueError, "ranks disagree", placed)

        def freeze(pairs):
            pairs[2][1].requires_grad_(self.rank != 1)
            return pairs

        pattern = "'w2'.*requires_grad is True on rank 0 and False on rank 1"
        self.assertRefused(ValueError, pattern, change=freeze)

    def test_different_hyperparameters(self):
        for field, other in {**OTHER_OPTIONS, "foreach": True}.items():
            given = re.escape(str(other))
            pattern = rf"'w0'.*{field} is .* on rank 0 and {given} on rank 2"
            options = {field: other} if self.rank == 2 else {}
            self.assertRefused(ValueError, pattern, **options)
        rates = {0: 0.1, 1: 0.1 + self.rank}
        params = self.whole((4, 6), (5, 3))
        groups = [{"params": [params[i]], "lr": rate} for i, rate in rates.items()]
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        build = functools.partial(Muon, groups, distributed_config=config)
        self.assertRaisesEverywhere(build, ValueError, "parameter 1 .*lr is 0.1 on")

    def test_invalid_option_of_one_rank(self):
        for field, other, expected in (
            ("lr", -1.0, "Learning rate should be >= 0 but is: -1.0"),
            ("momentum", -0.5, "momentum should be >= 0 but is: -0.5"),
            ("adjust_lr_fn", "x", "Adjust learning rate function x"),
            ("ns_algorithm", "x", "ns_algorithm must be one of"),
            # With options of a wrong type, the rank raised alone, before it met the others.
            ("momentum", "0.9", "not supported between"),
            ("ns_coefficients", None, "ranks disagree.*ns_coefficients"),
        ):
            options = {field: other} if self.rank == 2 else {}
            kind = TypeError if other == "0.9" else ValueError
            self.assertRefused(kind, expected, **options)
        for split in ((4, -1), (4, 5), "ab", {"size": 4}, {"sizes": 4, "repeats": "x"}):
            group = {"split": split} if self.rank == 2 else {}
            self.assertRefused(ValueError, "split", group=group)

    def test_error_of_a_rank_that_reaches_others_over_a_mesh(self):
        """Ranks 1 and 3 are in no group of the config with rank 0, which has an invalid option in a group."""
        mesh = grid_of(2, 2)
        config = create_auto_config(ddp_process_group=mesh.get_group("a"))
        group = {} if self.rank else {"adjust_lr_fn": "match_rms_adam"}
        options = {"distributed_config": config, "group": group}
        placed = [Spec((8, 8), mesh["b"], (S0,))]
        text = "function match_rms_adam is not supported"
        self.assertRefused(ValueError, text, placed, **options)

    def test_different_flags_of_the_config(self):
        for flag, value, pattern in (
            ("prefetch_count", 3, "is 1 on rank 0 and 3 on rank 1"),
            ("async_gpu_parallelism", False, "is True on rank 0 and False on rank 1"),
            # Ranks compare words, which are equal here.
            ("prefetch_count", "1", "must be an int >= 0 but is '1'"),
        ):
            config = create_dtensor_config()
            if self.rank == 1:
                setattr(config, flag, value)
            pattern = f"{flag} {pattern}"
            self.assertRefused(ValueError, pattern, distributed_config=config)

    def test_one_rank_with_a_destroyed_parameter(self):
        def change(pairs):
            destroyed = nn.Parameter(torch.ones(8, 8))
            destroyed.data = pairs[2][1].data
            return [*pairs[:2], ("w2", destroyed)] if self.rank == 1 else pairs

        self.assertRefused(ValueError, r"param\.data = dtensor", change=change)

    def assign(self, assignments):
        """A config of the factory whose assign_fn gives ``assignments``, or raises it."""

        def assign_fn(params, state):
            if isinstance(assignments, Exception):
                raise assignments
            return assignments

        return dataclasses.replace(create_dtensor_config(), assign_fn=assign_fn)

    def test_one_rank_with_a_bad_assign_fn(self):
        good = {0: [0, 1], 1: [2, 3]}
        for bad, kind, pattern in [
            ({0: [0], 1: [2, 3]}, AssertionError, r"missing \[1\].*'w1'"),
            ({0: [0, 1, 2], 9: [3]}, ValueError, "rank 9"),
            ({0: [0, 1], 2: [2, 3]}, ValueError, "'w2'.*owner is 1.*and 2 on rank 3"),
            (ValueError("no idea"), ValueError, "no idea"),
            (IndexError("no idea"), IndexError, "no idea"),
        ]:
            config = self.assign(bad if self.rank == 3 else good)
            self.assertRefused(kind, pattern, distributed_config=config)

    def test_owner_that_holds_no_piece(self):
        placed = [Spec((8, 8), mesh, (S0,)) for mesh in (mesh_of(4), mesh_of(2))]
        # Rank 2 holds no piece of what the first pair shares.
        config = self.assign({2: [0, 1]})
        pattern = r"parameter 1 'w1'.*rank 2.*\[0, 1\]"
        self.assertRefused(ValueError, pattern, placed, distributed_config=config)

    def test_disagreement_in_one_group_reaches_those_who_share_another(self):
        """The ranks of that group cannot build. Others learn of it at their first step, at the latest."""
        nested = mesh_of(4), mesh_of(2)
        overlapping = self.meshes_of_pairs([0, 1], [2, 3], [0, 2], [1, 3])
        # Each row ends with the two ranks that differ: global ones.
        for meshes, which, *ranks in (
            (nested, 1, 2, 3),
            (nested, 0, 0, 2),
            (overlapping, 1, 0, 2),
            (overlapping, 0, 2, 3),
        ):
            placed = [Spec((8, 8), mesh, (S0,)) for mesh in meshes]
            if self.rank == ranks[1]:
                placed[which] = placed[which]._replace(shape=(8, 9))
            for count, (kind, text) in self.outcomes(placed):
                self.assertEqual(kind, "RuntimeError" if count else "ValueError")
                told = "another rank failed before this step.*" * count
                differ = "disagree about parameter {} .* on rank {} and .* on rank {}"
                self.assertRegex(text, told + differ.format(which, *ranks))

    def test_error_at_an_end_of_a_chain_of_groups(self):
        """Ranks 0 and 1 share nothing with rank 3, which cannot build again. Their steps fail within the timeout."""
        meshes = self.meshes_of_pairs([0, 1], [1, 2], [2, 3])
        placed = [Spec((8, 8), mesh, (S0,)) for mesh in meshes]
        owners = {rank: [] for rank in range(4)}
        # Each matrix belongs to the first rank of its pair.
        for i, mesh in enumerate(meshes):
            owners[mesh.mesh[0].item()].append(i)
        config = self.assign(owners)
        optimizer = self.build(placed, named=False, distributed_config=config)
        optimizer.step()
        if self.rank == 3:
            owners.clear()
        rebuilt = self.outcome(lambda: optimizer.add_param_group({"params": []}))
        dist.barrier()
        found = everyone(rebuilt or self.outcome(optimizer.step))
        told = "another rank failed before this step.*" * (self.rank == 1)
        with self.everywhere(f"{found}"):
            self.assertEqual(rebuilt is None, self.rank < 2)
            # Rank 0 may still wait for rank 1 in the step, within the timeout.
            pattern = rf"{told}missing \[0\]" if self.rank else "."
            self.assertRegex(found[self.rank][1], pattern)

    def test_failed_add_param_group_leaves_the_optimizer_as_it_was(self):
        mesh = mesh_of(4)
        twins = Twins(self.placed())
        twins.step()
        shapes = [(6, 6), (6, 6 + (self.rank == 1))]
        group = {"params": [parameter(Spec(s, mesh, (S0,)), 9) for s in shapes]}
        add = functools.partial(twins.optimizer.add_param_group, group)
        self.assertRaisesEverywhere(add, ValueError, "parameter 5 .*shape is")
        self.assertEqual(len(twins.optimizer.param_groups), 1)
        self.assertTrainsAlike(twins)

    def test_reason_of_ranks_that_share_another_group(self):
        """Rank 2 shares no parameter with rank 0, which has no gradient. It learns why rank 1 has left."""
        meshes = self.meshes_of_pairs([0, 1], [1, 2])
        found = None
        if meshes:
            placed = [Spec((8, 8), mesh, (S0,)) for mesh in meshes]
            optimizer = self.build(placed, named=False)
            params = optimizer.param_groups[0]["params"]
            for step in range(3):
                for param in params:
                    param.grad = torch.ones_like(param)
                if step == 1:
                    # The host reads a mismatch when the next step begins.
                    as_on_an_accelerator(optimizer)
                    params[0].grad = None if self.rank == 0 else params[0].grad
                found = self.outcome(optimizer.step)
        for told in everyone(found)[:3]:
            self.assertRegex(told[1], "some have none")

    def test_optimizers_stepped_in_different_orders(self):
        mesh = mesh_of(4)
        for size, counts in ((8, (1, 1)), (4, (2, 260))):
            both = [Twins([Spec((size, 8), mesh, (S0,))] * count) for count in counts]
            for twins in both:
                twins.step()
                self.assertParity(twins)
            before = [snapshot(twins.params) for twins in both]
            for twins in both:
                twins.set_gradients()
            order = both[::-1] if self.rank == 2 else both
            for twins in order:
                self.assertRaisesEverywhere(
                    twins.optimizer.step,
                    RuntimeError,
                    "step different optimizers.*in the same order",
                )
            with self.everywhere(f"{counts}"):
                self.assertEqual([snapshot(twins.params) for twins in both], before)

    def test_mismatch_in_many_matrices(self):
        """Those after the first 256 have a further collective."""
        twins = Twins([Spec((4, 4), mesh_of(4), (S0,))] * 260)
        twins.set_gradients([259] if self.rank == 1 else [])
        pattern = r"some have none[^']* parameter 259 of shape \(4, 4\)$"
        step = twins.optimizer.step
        self.assertRaisesEverywhere(step, RuntimeError, pattern)
        self.assertTrainsAlike(twins, 1)
        as_on_an_accelerator(twins.optimizer)
        twins.set_gradients([259] if self.rank == 1 else [])
        step()
        self.assertRaisesEverywhere(step, RuntimeError, pattern)

    def test_failure_of_another_optimizer_over_the_same_ranks(self):
        """A rank that fails in one optimizer's step and then stays away is missed in the other's."""
        mesh = self.mesh_of_its_own("another")
        first, second = (Twins([Spec((8, 8), mesh, (S0,))]) for _ in range(2))
        for twins in (first, second):
            twins.step()
            twins.set_gradients()
        first.optimizer.param_groups[0]["ns_steps"] = 100
        self.assertRaisesEverywhere(first.optimizer.step, ValueError, "less than 100")
        if self.rank != 3:
            outcome = self.outcome(second.optimizer.step)
        else:
            outcome = "RuntimeError", "Ranks [3] did not come. Use ShardedGradScaler"
        for kind, text in everyone(outcome):
            self.assertEqual(kind, "RuntimeError")
            self.assertRegex(text, r"Ranks \[3\] did not come.*ShardedGradScaler")
            self.assertNotIn("less than 100", text)

    def test_failure_at_the_end_of_a_step(self):
        """The others have made that step. They hear of the failure in the next one."""
        twins = Twins([Spec((8, 8), self.mesh_of_its_own("late"), (S0,))])
        late = {"side_effect": LookupError("late") if self.rank == 3 else None}
        with mock.patch.object(torch.autograd.graph, "increment_version", **late):
            self.assertRaisesEverywhere(twins.step, LookupError, "late", [3])
        twins.set_gradients()
        found = everyone(self.outcome(twins.optimizer.step))
        with self.everywhere(f"{found}"):
            self.assertRegex(found[self.rank][1], "LookupError.*late")

    def test_construction_without_numpy(self):
        """torch's all_gather_object needs NumPy, and ranks said that one of them had ended."""
        missing = RuntimeError("Numpy is not available")
        with (
            mock.patch.object(torch.Tensor, "numpy", side_effect=missing),
            mock.patch.dict(sys.modules, {"numpy": None}),
        ):
            with self.assertRaisesRegex(RuntimeError, "not available"):
                dist.all_gather_object([None] * 4, self.rank)
            twins = Twins(self.placed())
            twins.step()
        self.assertParity(twins)

    def test_momentum_that_does_not_fit(self):
        pattern = r"parameter 0.*momentum buffer.*\(7, 8\)"
        small = Spec((7, 8), mesh_of(4), (S0,))
        for buffer in (torch.zeros(7, 8), common_muon.place(torch.zeros(7, 8), small)):
            twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)]))
            twins.step()
            state_dict = twins.optimizer.state_dict()
            state_dict["state"][0]["momentum_buffer"] = buffer
            load = functools.partial(twins.optimizer.load_state_dict, state_dict)
            self.assertRaisesEverywhere(load, ValueError, r"of another model.*\(7, 8\)")
            # The optimizer's own state may get it by other ways.
            twins.optimizer.state[twins.params[0]]["momentum_buffer"] = buffer
            self.assertNothingMoves(twins, RuntimeError, pattern)

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

    def whole(self, *shapes):
        return [nn.Parameter(full(i, shape)) for i, shape in enumerate(shapes)]

    def give_gradients(self, params):
        for i, param in enumerate(params):
            param.grad = full(90 + i, param.shape)

    def test_nothing_is_distributed(self):
        """A warning came in a pipeline, and where frameworks shard the model later."""
        for mesh, placements in ((None, None), (mesh_of(4), (S0,))):
            with self.assertWarnsOnce():
                twins = Twins([Spec((8, 6), mesh, placements)] * 2)
                self.assertTrainsAlike(twins, 3)

    def test_built_before_fully_shard(self):
        model = nn.Linear(8, 12, bias=False)
        muon = Muon(model.parameters(), distributed_config="auto")
        fully_shard(model, mesh=mesh_of(4))
        with self.assertWarnsOnce("no parameter of this Muon has had a gradient"):
            for _ in range(hints.STEPS_WITHOUT_ANY + 2):
                model(torch.ones(2, 8)).sum().backward()
                muon.step()

    @mock.patch.object(hints, "STEPS_WITHOUT_ONE", 5)
    def test_parameter_that_is_never_trained(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)] * 4))
        pattern = (
            r"have had no gradient in .*: parameter 2 of shape \(8, 6\)\. The model"
        )
        twins.params[3].requires_grad_(False)
        with self.assertWarnsOnce(pattern):
            for step in range(8):
                twins.set_gradients(missing=range(4) if step == 4 else [2, 3])
                twins.optimizer.step()

    def test_parameters_that_lose_their_gradients(self):
        """``load_state_dict(assign=True)`` in the middle leaves Muon with tensors that the model does not have."""
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)] * 2))

        def steps(count, missing=()):
            for _ in range(count):
                twins.set_gradients(missing)
                twins.optimizer.step()

        with mock.patch.object(hints, "STEPS_WITHOUT_ONE", 5):
            with self.assertWarnsOnce():
                steps(2)
                # A gradient in between starts the count again.
                steps(4, [1])
                steps(1)
                steps(2, [0, 1])
                steps(2, [1])
                steps(1, [0])
            pattern = r"no gradient in 5 steps.*: parameter 1 of shape \(8, 6\)\. .*assign=True"
            with self.assertWarnsOnce(pattern):
                steps(5, [1])
            with self.assertWarnsOnce():
                steps(1)
                steps(6, [1])
        pattern = "no parameter of this Muon has had a gradient in 3 steps"
        with self.assertWarnsOnce(pattern):
            steps(9, [0, 1])

    def blocks(self):
        """A model whose root, sharded by FSDP2, has a matrix too, after a forward without a backward."""
        layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
        model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2])
        fully_shard(model[0], mesh=mesh_of(4))
        fully_shard(model, mesh=mesh_of(4))
        with torch.no_grad():
            model(torch.ones(2, 8))
        return model

    def test_built_while_the_root_is_unsharded(self):
        """Muon took plain tensors, which never get a gradient."""
        model = self.blocks()
        nested = nn.Sequential(model)
        for partition in (partition_parameters, partition_named_parameters):
            for where, prefix, way in (
                (model, "", r"call model\.reshard\(\) first"),
                (nested, "0.", r"\(name\)\.reshard\(\) for each name in \['0'\] first"),
            ):
                pattern = f"FSDP2 has unsharded {prefix}1.weight, as .*: .*{way}"
                self.assertRaisesEverywhere(lambda: partition(where), pattern=pattern)
        model[0].unshard()
        pattern = (
            r"unsharded 0\.0\.weight, 0\.1\.weight, 1.weight.*each name in \['', '0'\]"
        )
        self.assertRaisesEverywhere(
            lambda: partition_parameters(model), pattern=pattern
        )
        model[0].reshard()
        model.reshard()
        matrices, _ = partition_named_parameters(model)
        muon = Muon(matrices, distributed_config="auto")
        with self.everywhere():
            self.assertNotIn("FSDP2", muon.describe(model))
        before = snapshot(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        muon.step()
        with self.everywhere():
            for param, old in zip(snapshot(model.parameters()), before):
                self.assertNotEqual(param, old)

    def test_built_from_other_tensors_than_the_shards(self):
        """FSDP2 cuts them for a smaller mesh, or has other shards than it knows."""
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
        mesh = DeviceMesh("cpu", torch.arange(4))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 8))
        pattern = r"unsharded 0\.weight, 1\.weight.*\['', '0'\]"
        self.assertRaisesEverywhere(
            lambda: partition_parameters(model), pattern=pattern
        )
        for unit in (model, model[0]):
            unit.reshard()
        model.to_empty(device="cpu")
        with self.everywhere():
            matrices, _ = partition_parameters(model)
            self.assertEqual({type(matrix.data) for matrix in matrices}, {DTensor})

    def test_describe_while_the_root_is_unsharded(self):
        """A Muon that is right was said to have nothing of the model, and one that is wrong was not."""
        model = self.blocks()
        wrong = Muon([*model.parameters()], distributed_config="auto")
        model.reshard()
        right = Muon([*model.parameters()], distributed_config="auto")
        model.unshard()
        now = r"FSDP2 has unsharded 1\.weight\. Before .*, call model\.reshard\(\)$"
        then = r"FSDP2 had unsharded 1\.weight when an optimizer was built"
        with self.everywhere():
            page = right.describe(model)
            self.assertIn("That is 100.0% of the model's 192 elements", page)
            self.assertRegex(page, f"(?m)^{now}")
            self.assertNotRegex(page, "No optimizer|had unsharded")
        for _ in range(2):
            with self.everywhere():
                page = wrong.describe(model)
                self.assertRegex(page, f"(?m)^{then}")
                self.assertIn("No optimizer given here has 1.weight\n", page)
                self.assertIn("That is 66.7% of", page)
            model.reshard()
        with self.everywhere():
            self.assertNotIn("has unsharded", wrong.describe(model))
        with self.assertWarnsOnce(r"this Muon has had a gradient.*call model\.reshard"):
            for _ in range(hints.STEPS_WITHOUT_ANY):
                wrong.step()

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
            with mock.patch.object(buckets, "MAX_REPLICAS", max_replicas):
                muon = self.replicas()
            group = muon.param_groups[0]
            lr, group["lr"] = group["lr"], 0.1 + self.rank
            self.assertRaisesEverywhere(muon.step, RuntimeError, "hyperparameters")
            group["lr"] = lr
            pattern = r"different values.*ZeroRedundancyOptimizer.*: parameter 1 of shape \(5, 3\)$"
            for _ in range(2):
                self.assertRaisesEverywhere(muon.step, RuntimeError, pattern)

    def test_replicas_that_are_passed_as_shards(self):
        """Two replicas counted as the halves of a matrix, without a word."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        params = self.whole((4, 6), (5, 3))
        pattern = "parameter 0.*parameter 1.*all ranks hold the same.*ddp_process_group"
        with self.assertWarnsOnce(pattern):
            Muon(params, distributed_config=config)
        # Zeros are no sign of replicas, and neither is one shard that differs, or sums of 12.0, 12.05 and so on.
        near = torch.full((4, 6), 0.5 + self.rank / 512)
        with self.assertWarnsOnce():
            for param in (torch.zeros(4, 6), full(int(self.rank == 3), (4, 6)), near):
                Muon([nn.Parameter(param)], distributed_config=config)

    def test_gradient_of_another_kind(self):
        """A functional step of two sharded matrices. Rank 1 has another gradient for the second one."""
        usual = torch.ones(4, 8)
        for other, own in (
            (usual.to_sparse(), "sparse gradients"),
            (torch.ones(5, 8), r"has shape \(4, 8\), but its gradient \(5, 8\)"),
            (usual.to("meta"), "is on cpu, but its gradient meta"),
            (usual.to(torch.complex64), "is complex False, but its gradient True"),
        ):
            config = create_auto_config(fsdp_process_group=dist.group.WORLD)
            params, momenta = ([full(i, (4, 8)) for i in range(2)] for _ in range(2))
            grads = [usual, other if self.rank == 1 else usual]
            problem = own if self.rank == 1 else "it cannot use"
            pattern = rf"^(?=.*{problem}).*parameter 1 of shape \("
            options = {**FUNCTIONAL, "distributed_config": config}
            step = functools.partial(functional_muon, params, grads, momenta, **options)
            self.assertRaisesEverywhere(step, RuntimeError, pattern)

    def test_piece_of_a_parameter_that_nothing_is_known_of(self):
        config = create_dtensor_config()
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "call gather_fn before"):
                config.redistribute_fn(full(0, (8, 6)), 0, config.state)

    def test_kinds_of_numbers_are_no_difference(self):
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 6)]), weight_decay=0.0)
        twins.step()
        (group,) = twins.optimizer.param_groups
        if self.rank == 1:
            group.update(adjust_lr_fn="original", nesterov=1, weight_decay=0)
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
        twins.step()
        self.assertParity(twins)

    def test_values_of_a_model_that_a_checkpoint_fills(self):
        """torch.distributed.checkpoint makes momentum by a step of zeros with a learning rate of zero."""
        muon = self.replicas()
        params = muon.param_groups[0]["params"]
        get_optimizer_state_dict(nn.ParameterList(params), muon)
        for i, param in enumerate(params):
            param.data.copy_(full(i, param.shape))
        self.give_gradients(params)
        with self.everywhere():
            muon.step()
        self.assertEqual(len(set(everyone(params[1].sum().item()))), 1)

    def test_values_are_compared_when_they_first_move(self):
        """Ranks that held different further groups compared different things."""
        two = DeviceMesh("cpu", [0, 1])
        params = []
        # Ranks 2 and 3 hold none of the second group.
        for i, mesh in enumerate([mesh_of(4)] * 2 + [two] * 2 * (self.rank < 2)):
            value = distribute_tensor(full(i, (4, 6)), mesh, [R])
            params.append(nn.Parameter(value))
            params[i].grad = torch.ones_like(value)
        still = {"params": params[:2], "lr": 0.0, "weight_decay": 0.0}
        muon = Muon([still, {"params": params[2:]}], lr=0.1, distributed_config="auto")
        with self.everywhere():
            muon.step()
        if self.rank == 3:
            params[1].data.to_local().add_(1)
        muon.param_groups[0]["lr"] = 0.1
        pattern = "different values.*: parameter 1 of shape"
        self.assertRaisesEverywhere(muon.step, RuntimeError, pattern)

    def test_ranks_that_replaced_different_parameters(self):
        """Momentum restarted for different parameters, so replicas got different updates."""
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        twins = Twins([Cut((8, 8)), Cut((12, 5)), Cut((8, 8))], config)
        twins.step()
        at = int(self.rank > 0)
        twins.params[at] = nn.Parameter(twins.params[at].detach().clone())
        twins.optimizer.param_groups[0]["params"] = list(twins.params)
        self.assertNothingMoves(twins, ValueError, "parameter 0 .*replaced is")

    def test_constructor_on_an_accelerator(self):
        """Ranks connect there after they have agreed. One had no memory for it, or had parameters elsewhere."""

        def build():
            config = create_auto_config(ddp_process_group=dist.group.WORLD)
            Muon([nn.Parameter(torch.ones(4, 4))], distributed_config=config)

        meta = mock.patch.object(Setting, "device", torch.device("meta"))
        error = torch.OutOfMemoryError("no memory")
        full = mock.patch.object(transport.Memory, "zeros", side_effect=error)
        nothing = contextlib.nullcontext()
        with meta, full if self.rank == 1 else nothing:
            self.assertRaisesEverywhere(build, RuntimeError, "no memory")
        pattern = "device is cpu on rank 0 and meta on rank 1"
        with meta if self.rank == 1 else nothing:
            self.assertRaisesEverywhere(build, ValueError, pattern)

    def test_order_over_two_groups_of_the_same_ranks(self):
        """Each rank compared its parameters in the group of its own first one."""
        patience = timedelta(seconds=3)
        groups = [dist.new_group(range(4), timeout=patience) for _ in range(2)]
        meshes = [
            DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
            for group, name in zip(groups, "ab")
        ]
        given = [
            (f"w{i}", parameter(Spec((8, 8), m, (S0,)))) for i, m in enumerate(meshes)
        ]
        given = given if self.rank else given[::-1]
        build = functools.partial(Muon, given, distributed_config="auto")
        pattern = "name is w1 on rank 0 and w0 on rank 1"
        self.assertRaisesEverywhere(build, ValueError, pattern)


class TestMuonOverlappingGroups(common_muon.OnCPU):
    """Groups of ranks that have some, but not all ranks in common. Those that come first in a step must hear of a
    mismatch in a later one.
    """

    def twins_over(self, *pairs):
        """Twins of one matrix for each of ``pairs`` of ranks, and the indices of this rank's matrices among them."""
        numbers = [n for n, pair in enumerate(pairs) if self.rank in pair]
        placed = []
        for pair in pairs:
            # A wait for another rank must end before the test does.
            group = dist.new_group(pair, timeout=timedelta(seconds=10))
            if self.rank in pair:
                mesh = DeviceMesh.from_group(
                    group, "cpu", mesh_dim_names=(f"{pair} of {pairs}",)
                )
                placed.append(Spec((8, 6), mesh, (S0,)))
        return Twins(placed, seeds=numbers), numbers

    ROWS_AND_COLUMNS = ((0, 1), (2, 3), (0, 2), (1, 3))

    def test_a_mismatch_reaches_groups_that_came_before(self):
        """Ranks of a column waited in their gathers for a rank that had left for a mismatch in its row."""
        for number, culprit in itertools.product(range(4), range(4)):
            pair = self.ROWS_AND_COLUMNS[number]
            if culprit not in pair:
                continue
            with self.subTest(pair=pair, culprit=culprit):
                twins, numbers = self.twins_over(*self.ROWS_AND_COLUMNS)
                twins.step()
                twins.set_gradients()
                if self.rank == culprit:
                    twins.params[numbers.index(number)].grad = None
                before = snapshot(twins.params)
                found = everyone(self.outcome(twins.optimizer.step))
                with self.everywhere(f"{found}"):
                    for rank, outcome in enumerate(found):
                        self.assertEqual(outcome[0], "RuntimeError")
                        told = (
                            "some have none" if rank in pair else "Their error says how"
                        )
                        self.assertRegex(outcome[1], told)
                    self.assertEqual(snapshot(twins.params), before)
                # Nothing has moved, so the same step works with all gradients.
                twins.steps -= 1
                twins.step()
                self.assertParity(twins)

    def test_a_rank_that_is_in_one_of_the_groups_only(self):
        """Rank 1 knows no other group. Rank 0 tells it that theirs overlaps one."""
        twins, numbers = self.twins_over((0, 1), (0, 2))
        if numbers:
            twins.set_gradients()
            if self.rank == 2:
                twins.params[0].grad = None
        step = twins.optimizer.step if numbers else lambda: None
        found = everyone(self.outcome(step))
        with self.everywhere(f"{found}"):
            self.assertIsNone(found[3])
            patterns = "some have none", "Their error says how", "some have none"
            for outcome, pattern in zip(found, patterns):
                self.assertRegex(outcome[1], pattern)

    def test_only_such_groups_have_one_more_collective(self):
        nested = [Spec((8, 8), mesh_of(4), (S0,)), Spec((8, 8), mesh_of(2), (S0,))]
        overlapping, _ = self.twins_over(*self.ROWS_AND_COLUMNS)
        for twins, count in ((Twins(nested), 2), (overlapping, 4)):
            twins.step()
            with Recorder() as seen:
                twins.step()
            reduced = [call for call in seen.calls if call.name == "all_reduce"]
            with self.everywhere():
                self.assertEqual(len(reduced), count)
                small = [call for call in reduced if call.nbytes == 8]
                self.assertEqual(len(small), count - 2)


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

    def test_divided_matrix(self):
        """So was each block of a divided matrix."""
        config = create_dtensor_config(owners_per_matrix=4)
        with mock.patch.object(division, "MIN_DIVIDED", 4):
            spec = Spec((16, 8), mesh_of(4), (S0,))
            param = parameter(spec)
            optimizer = Muon([param], distributed_config=config)
            param.grad = torch.ones_like(param)
            if self.rank == 1:
                param.grad = None
            before = snapshot([param])
            step = optimizer.step
            self.assertRaisesEverywhere(step, RuntimeError, "some have none")
            with self.everywhere():
                self.assertEqual(snapshot([param]), before)

    def test_no_rank_has_one(self):
        spec = Spec((16, 8), mesh_of(4), (S0,))
        twins = Twins([spec, spec], groups=[((0, 1), {"split": (4, 4, 4, 4)})])
        self.assertTrainsAlike(twins, 3, missing=lambda step: [step % 2])

    def test_many_parts_have_one_row_of_statuses(self):
        spec = Spec((2400, 2), mesh_of(4), (S0,))
        twins = Twins([spec], groups=[((0,), {"split": [2] * 1200})])
        (statuses,) = twins.optimizer._engine._make_runner().side_channel.statuses
        with self.everywhere():
            # A second all-reduce would follow for more rows than the first one has.
            self.assertEqual(len(statuses._table), 256)


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
            twins.set_gradients()
            if self.rank == 1:
                twins.params[0]._grad = torch.ones(8, 8).to_sparse()
            step = twins.optimizer.step
            self.assertRaisesEverywhere(step, RuntimeError, "parameter 0.*sparse", [1])

    def test_gradient_that_only_its_own_rank_would_need(self):
        """No other rank has the matrix. All have another one, whose gather would wait for this rank."""
        shared = parameter(Spec((8, 8), mesh_of(4), (S0,)))
        alone = nn.Parameter(torch.ones(4, 8))
        optimizer = Muon([shared, alone], distributed_config="auto")
        shared.grad, alone.grad = torch.ones_like(shared), torch.ones(4, 8)
        if self.rank == 1:
            alone._grad = torch.ones(4, 8).to_sparse()
        before = snapshot([shared, alone])
        text = "parameter 1 .*sparse" if self.rank == 1 else "that this rank does not"
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

    def test_partial_gradient_on_some_ranks_only(self):
        """DTensor's collective for the gradient waited for the rank without one."""
        spec = Spec((8, 8), mesh_of(4), (R,))
        param = parameter(spec)
        optimizer = Muon([param], distributed_config="auto")
        for missing in ((), (2,), (), (0, 1)):
            ones = torch.ones(8, 8)
            grad = DTensor.from_local(ones, spec.mesh, (Partial(),), run_check=False)
            param.grad = None if self.rank in missing else grad
            before = snapshot([param])
            if not missing:
                optimizer.step()
                self.assertNotEqual(snapshot([param]), before)
                continue
            self.assertRaisesEverywhere(optimizer.step, RuntimeError, "some have none")
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
