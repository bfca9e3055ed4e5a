# Owner(s): ["oncall: distributed"]
"""Mistakes while the distributed Muon is built: which ranks hear of them, and that none waits for ever."""

import contextlib
import functools
import re
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Muon
from torch.optim._muon_engine.building import Setting
from torch.optim._muon_engine.runtime import transport
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.fuzz_plans import OTHER
from torch.testing._internal.distributed._muon.common_errors import (
    MistakesTestCase,
    parameter,
)
from torch.testing._internal.distributed._muon.common_muon import (
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


# The options that ranks compare, with valid values that are not the defaults.
OTHER_OPTIONS = {**OTHER, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}


class TestMuonMistakes(MistakesTestCase):
    """Parameters, options and configs that differ between ranks."""

    def test_different_parameters(self):
        for field, value, pattern in [
            ("shape", (7, 6), r"shape is \(7, 5\) on rank 0 and \(7, 6\) on rank 2"),
            ("dtype", torch.bfloat16, "dtype is torch.float32 on rank 0"),
            ("placements", (S1,), "rank 0.*rank 2"),
        ]:
            with self.subTest(field=field, value=value):
                placed = self.placed()
                if self.rank == 2:
                    placed[1] = placed[1]._replace(**{field: value})
                self.assertRefused(ValueError, f"parameter 1 'w1'.*{pattern}", placed)
        placed = self.placed()
        if self.rank == 3:
            # It has one parameter less than the others.
            placed.pop(0)
        self.assertRefused(ValueError, "ranks disagree", placed)

        def freeze(pairs):
            pairs[2][1].requires_grad_(self.rank != 1)
            return pairs

        pattern = "'w2'.*requires_grad is True on rank 0 and False on rank 1"
        self.assertRefused(ValueError, pattern, change=freeze)

    def test_different_hyperparameters(self):
        for field, other in {**OTHER_OPTIONS, "foreach": True}.items():
            with self.subTest(field=field, other=other):
                given = re.escape(str(other))
                pattern = rf"'w0'.*{field} is .* on rank 0 and {given} on rank 2"
                options = {field: other} if self.rank == 2 else {}
                self.assertRefused(ValueError, pattern, **options)
        first, second = self.whole((4, 6), (5, 3))
        groups = [
            {"params": [first], "lr": 0.1},
            {"params": [second], "lr": 0.1 + self.rank},
        ]
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        build = functools.partial(Muon, groups, distributed_config=config)
        self.assertRaisesEverywhere(build, ValueError, "parameter 1 .*lr is 0.1 on")

    def test_two_names_of_one_algorithm(self):
        """They are no different options, neither when ranks build Muon nor in a step."""
        name = "standard" if self.rank == 2 else "quintic"
        twins = Twins(self.placed(), ns_algorithm=name)
        twins.step()
        if self.rank == 1:
            twins.optimizer.param_groups[0]["ns_algorithm"] = "standard"
        twins.step()
        # The engine is built again, and checks all groups.
        added = parameter(Spec((6, 6), mesh_of(4), (S0,)), 9)
        twins.optimizer.add_param_group({"params": [added]})
        self.assertTrainsAlike(twins)

    def test_invalid_option_of_one_rank(self):
        for option, value, kind, pattern in (
            ("lr", -1.0, ValueError, "Learning rate should be >= 0 but is: -1.0"),
            ("momentum", -0.5, ValueError, "momentum should be >= 0 but is: -0.5"),
            ("adjust_lr_fn", "x", ValueError, "Adjust learning rate function x"),
            ("ns_algorithm", "x", ValueError, "ns_algorithm must be one of"),
            # With options of a wrong type, the rank raised alone, before it met the others.
            ("momentum", "0.9", TypeError, "momentum must be a number"),
            ("ns_coefficients", None, TypeError, "ns_coefficients must be numbers"),
        ):
            with self.subTest(option=option, value=value, kind=kind):
                options = {option: value} if self.rank == 2 else {}
                self.assertRefused(kind, pattern, **options)
        for split in ((4, -1), (4, 5), "ab", {"size": 4}, {"sizes": 4, "repeats": "x"}):
            with self.subTest(split=split):
                group = {"split": split} if self.rank == 2 else {}
                self.assertRefused(ValueError, "split", group=group)

    def test_different_flags_of_the_config(self):
        for flag, value, pattern in (
            ("prefetch_count", 3, "is 1 on rank 0 and 3 on rank 1"),
            ("async_gpu_parallelism", False, "is True on rank 0 and False on rank 1"),
            # Ranks compare words, which are equal here.
            ("prefetch_count", "1", "must be an int >= 0 but is '1'"),
        ):
            with self.subTest(flag=flag, value=value):
                config = create_dtensor_config()
                if self.rank == 1:
                    setattr(config, flag, value)
                pattern = f"{flag} {pattern}"
                self.assertRefused(ValueError, pattern, distributed_config=config)

    def test_functions_that_one_rank_replaced(self):
        """It would call them for each matrix, while the others exchange buckets."""
        for name in ("gather", "redistribute"):
            with self.subTest(name=name):
                config = create_dtensor_config()
                if self.rank == 1:
                    common_muon.wrap_functions(config, f"{name}_fn")
                pattern = rf"functions of your own is \[\] on rank 0 and \['{name}'\]"
                self.assertRefused(ValueError, pattern, distributed_config=config)

    def test_one_rank_with_a_destroyed_parameter(self):
        def change(pairs):
            destroyed = nn.Parameter(torch.ones(8, 8))
            destroyed.data = pairs[2][1].data
            return [*pairs[:2], ("w2", destroyed)] if self.rank == 1 else pairs

        self.assertRefused(ValueError, r"param\.data = dtensor", change=change)

    def test_one_rank_with_a_bad_assign_fn(self):
        good = {0: [0, 1], 1: [2, 3]}
        for bad, kind, pattern in [
            ({0: [0], 1: [2, 3]}, AssertionError, r"missing \[1\].*'w1'"),
            ({0: [0, 1, 2], 9: [3]}, ValueError, "rank 9"),
            ({0: [0, 1], 2: [2, 3]}, ValueError, "'w2'.*owner is 1.*and 2 on rank 3"),
            (ValueError("no idea"), ValueError, "no idea"),
            (IndexError("no idea"), IndexError, "no idea"),
        ]:
            with self.subTest(bad=bad, kind=kind):
                config = self.assign(bad if self.rank == 3 else good)
                self.assertRefused(kind, pattern, distributed_config=config)

    def test_owner_that_holds_no_piece(self):
        placed = [Spec((8, 8), mesh, (S0,)) for mesh in (mesh_of(4), mesh_of(2))]
        # Rank 2 holds no piece of what the first pair shares.
        config = self.assign({2: [0, 1]})
        pattern = r"parameter 1 'w1'.*rank 2.*\[0, 1\]"
        self.assertRefused(ValueError, pattern, placed, distributed_config=config)

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
            for group, name in zip(groups, ("a", "b"), strict=True)
        ]
        first, second = meshes
        given = [
            ("w0", parameter(Spec((8, 8), first, (S0,)))),
            ("w1", parameter(Spec((8, 8), second, (S0,)))),
        ]
        if self.rank == 0:
            given.reverse()
        build = functools.partial(Muon, given, distributed_config="auto")
        pattern = "name is w1 on rank 0 and w0 on rank 1"
        self.assertRaisesEverywhere(build, ValueError, pattern)


class TestMuonChainsOfGroups(MistakesTestCase):
    """Ranks that share nothing with the one that has a mistake hear of it from those between."""

    def test_error_of_a_rank_that_reaches_others_over_a_mesh(self):
        """Ranks 1 and 3 are in no group of the config with rank 0, which has an invalid option in a group."""
        mesh = grid_of(2, 2)
        config = create_auto_config(ddp_process_group=mesh.get_group("a"))
        group = {} if self.rank else {"adjust_lr_fn": "match_rms_adam"}
        options = {"distributed_config": config, "group": group}
        placed = [Spec((8, 8), mesh["b"], (S0,))]
        text = "function match_rms_adam is not supported"
        self.assertRefused(ValueError, text, placed, **options)

    def test_disagreement_in_one_group_reaches_those_who_share_another(self):
        """No rank can build."""
        for index, usual, culprit in ((1, 2, 3), (0, 0, 2)):
            placed = [Spec((8, 8), mesh, (S0,)) for mesh in (mesh_of(4), mesh_of(2))]
            if self.rank == culprit:
                placed[index] = placed[index]._replace(shape=(8, 9))
            disagree = f"disagree about parameter {index} .* on rank {usual} and .* on rank {culprit}"
            with self.subTest(index=index, usual=usual, culprit=culprit):
                build = functools.partial(self.build, placed)
                self.assertRaisesEverywhere(build, ValueError, disagree)


if __name__ == "__main__":
    run_tests()
