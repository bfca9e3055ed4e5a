# Owner(s): ["oncall: distributed"]
"""Mistakes that once were silent: which message they get, how often, and on which ranks."""

import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.optim import Muon
from torch.optim._muon_engine import hints
from torch.optim._muon_engine.schedule import buckets
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.common_muon import (
    Collectives,
    Cut,
    everyone,
    full,
    GlooOnCPU,
    grid_of,
    mesh_of,
    ParityAssertions,
    R,
    S0,
    specs,
    Twins,
)


# The options that a step compares, with values that are not the defaults.
OTHER_OPTIONS = {
    "lr": 0.0,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "nesterov": False,
    "ns_coefficients": (3.4, -4.7, 2.0),
    "ns_steps": 4,
    "eps": 1e-6,
    "adjust_lr_fn": "match_rms_adamw",
    "ns_algorithm": "gram",
}


@requires_gloo()
class TestMuonMistakes(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4

    def whole(self, *shapes):
        return [nn.Parameter(full(i, shape)) for i, shape in enumerate(shapes)]

    def give_gradients(self, params):
        for i, param in enumerate(params):
            param.grad = full(90 + i, param.shape)

    def assertWarnedOnce(self, warned, text):
        """On the first rank, and on no other."""
        texts = [str(one.message) for one in warned]
        count = sum(text in one for one in texts)
        self.assertEverywhere([] if count == int(self.rank == 0) else texts or ["none"])

    # Nothing is distributed

    def test_nothing_is_distributed(self):
        params = self.whole((4, 6), (5, 3))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            muon = Muon(params, distributed_config=create_dtensor_config())
            for _ in range(3):
                self.give_gradients(params)
                muon.step()
        self.assertWarnedOnce(warned, "each process orthogonalizes all")

    def test_sharded_before_the_first_step_is_no_mistake(self):
        layout = specs(mesh_of(4), [(S0,)], [(8, 6)])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self.assertTrainsAlike(Twins(layout), 2)
        self.assertEverywhere([str(one.message) for one in warned])

    def test_built_before_fully_shard(self):
        model = nn.Linear(8, 12, bias=False)
        muon = Muon(model.parameters(), distributed_config="auto")
        fully_shard(model, mesh=mesh_of(4))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(hints.STEPS_WITHOUT_ANY + 2):
                model(torch.ones(2, 8)).sum().backward()
                muon.step()
        self.assertWarnedOnce(warned, "no parameter of this Muon has had a gradient")

    def test_parameter_that_is_never_trained(self):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)] * 4))
        with (
            mock.patch.object(hints, "STEPS_WITHOUT_ONE", 5),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            for _ in range(hints.STEPS_WITHOUT_ONE + 3):
                twins.set_gradients(missing=[2])
                twins.optimizer.step()
        self.assertWarnedOnce(warned, "have had no gradient in")
        if self.rank == 0:
            (text,) = {
                str(one.message) for one in warned if "no gradient" in str(one.message)
            }
            self.assertRegex(text, r"parameter 2 of shape \(8, 6\)$")

    # Ranks that are not replicas

    def replicas(self, config=None):
        """Parameters of equal shapes. Rank 2 has other values."""
        params = self.whole((4, 6), (5, 3))
        if self.rank == 2:
            params[1].data += 1
        if config is None:
            config = create_auto_config(ddp_process_group=dist.group.WORLD)
        self.give_gradients(params)
        return Muon(params, distributed_config=config)

    @parametrize("max_replicas", [1, 4])
    def test_replicas_with_other_values(self, max_replicas):
        with mock.patch.object(buckets, "MAX_REPLICAS", max_replicas):
            muon = self.replicas()
        self.assertRaisesEverywhere(
            muon.step,
            RuntimeError,
            r"ZeroRedundancyOptimizer.*: parameter 1 of shape \(5, 3\)$",
        )

    def test_values_are_compared_once_and_send_nothing(self):
        twins = Twins(specs(mesh_of(4), [(R,)], [(8, 6)] * 4))
        calls = []
        for _ in range(3):
            with Collectives() as seen:
                twins.step()
            calls.append(seen.calls)
        self.assertEverywhere([] if calls[0] == calls[1] == calls[2] else calls)
        self.assertParity(twins)

    def test_zero_redundancy_optimizer(self):
        params = self.whole(*[(6, 6)] * 8)
        zero = ZeroRedundancyOptimizer(
            params,
            optimizer_class=Muon,
            lr=0.1,
            distributed_config=create_auto_config(ddp_process_group=dist.group.WORLD),
        )
        self.give_gradients(params)
        self.assertRaisesEverywhere(
            zero.step, RuntimeError, "ZeroRedundancyOptimizer.*leave their group out"
        )

    def test_replicas_that_are_passed_as_shards(self):
        """Two replicas counted as the halves of a matrix, without a word."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        params = self.whole((4, 6), (5, 3))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            Muon(params, distributed_config=config)
        text = "all ranks hold the same values"
        self.assertWarnedOnce(warned, text)
        if self.rank == 0:
            (said,) = (str(w.message) for w in warned if text in str(w.message))
            self.assertRegex(said, r"parameter 0 .*parameter 1 .*ddp_process_group")

    def test_shards_that_may_be_equal(self):
        """Zeros are no sign of replicas, and neither is one shard that differs."""
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        zeros = [nn.Parameter(torch.zeros(4, 6))]
        shards = [nn.Parameter(full(int(self.rank == 3), (4, 6)))]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for params in (zeros, shards):
                Muon(params, distributed_config=config)
        self.assertEverywhere([str(one.message) for one in warned])

    # Functions of the user's

    def test_piece_of_a_parameter_that_nothing_is_known_of(self):
        config = create_dtensor_config()
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "call gather_fn before"):
                config.redistribute_fn(full(0, (8, 6)), 0, config.state)

    # Hyperparameters

    @parametrize("max_replicas", [1, 4])
    def test_learning_rate_of_one_rank(self, max_replicas):
        for layout in (
            specs(mesh_of(4), [(R,)], [(8, 6)] * 3),
            specs(grid_of(2, 2), [(R, S0)], [(8, 6)] * 3),
        ):
            with mock.patch.object(buckets, "MAX_REPLICAS", max_replicas):
                twins = Twins(layout)
            for step in range(2):
                # The schedulers of all ranks agree.
                for optimizer in (twins.optimizer, twins.single):
                    optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
                twins.step()
                self.assertParity(twins)
            if self.rank == 1:
                twins.optimizer.param_groups[0]["lr"] *= 0.5
            twins.set_gradients()
            self.assertRaisesEverywhere(
                twins.optimizer.step,
                RuntimeError,
                "different hyperparameters.*parameter 0 .*parameter 2",
            )

    @parametrize("name", list(OTHER_OPTIONS))
    def test_hyperparameter_of_one_rank_in_the_first_step(self, name):
        twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 6)]))
        if self.rank == 3:
            twins.optimizer.param_groups[0][name] = OTHER_OPTIONS[name]
        twins.set_gradients()
        self.assertRaisesEverywhere(
            twins.optimizer.step,
            RuntimeError,
            "different hyperparameters.*parameter 0 of shape",
        )

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
        for i in range(4 if self.rank < 2 else 2):
            mesh = mesh_of(4) if i < 2 else two
            value, grad = (
                distribute_tensor(full(i + 9 * which, (4, 6)), mesh, [R])
                for which in range(2)
            )
            params.append(nn.Parameter(value))
            params[i].grad = grad
        still = {"params": params[:2], "lr": 0.0, "weight_decay": 0.0}
        muon = Muon([still, {"params": params[2:]}], lr=0.1, distributed_config="auto")
        with self.everywhere():
            muon.step()
        first = muon.param_groups[0]
        if self.rank == 3:
            first["params"][1].data.to_local().add_(1)
        first["lr"] = 0.1
        self.assertRaisesEverywhere(
            muon.step, RuntimeError, "different values.*: parameter 1 of shape"
        )

    def test_ranks_that_replaced_different_parameters(self):
        """Momentum restarted for different parameters, so replicas got different updates."""
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        twins = Twins([Cut((8, 8)), Cut((12, 5)), Cut((8, 8))], config)
        twins.step()
        at = int(self.rank > 0)
        twins.params[at] = nn.Parameter(twins.params[at].detach().clone())
        (group,) = twins.optimizer.param_groups
        group["params"] = list(twins.params)
        twins.set_gradients()
        before = [param.detach().clone() for param in twins.params]
        with self.everywhere():
            with self.assertRaisesRegex(ValueError, "parameter 0 .*replaced is"):
                twins.optimizer.step()
            for param, old in zip(twins.params, before, strict=True):
                self.assertTrue(torch.equal(param, old))

    def test_values_are_compared_after_functions_of_the_users(self):
        config = create_auto_config(ddp_process_group=dist.group.WORLD)
        muon = self.replicas(config)
        gather = config.gather_fn
        config.gather_fn = lambda *args: gather(*args)
        muon.step()
        config.gather_fn = gather
        self.assertRaisesEverywhere(
            muon.step, RuntimeError, "different values.*: parameter 1 of shape"
        )

    # A step that one rank skips

    def test_step_that_one_rank_skips(self):
        group = dist.new_group(timeout=timedelta(seconds=2))
        params = [nn.Parameter(full(self.rank, (2, 6)))]
        muon = Muon(
            params, distributed_config=create_auto_config(fsdp_process_group=group)
        )
        self.give_gradients(params)
        muon.step()
        self.give_gradients(params)
        outcome = None if self.rank == 2 else self.outcome(muon.step)
        for rank, found in enumerate(everyone(outcome)):
            if rank != 2:
                self.assertRegex(
                    found[1], r"Ranks \[2\] did not come.*ShardedGradScaler"
                )


instantiate_parametrized_tests(TestMuonMistakes)


if __name__ == "__main__":
    run_tests()
