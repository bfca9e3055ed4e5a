# Owner(s): ["oncall: distributed"]
"""Many replicas: one of them exchanges a shard with the owner, and relays the result to the others."""

from unittest import mock

from torch.optim._muon_engine.schedule import buckets, specs as packing
from torch.optim.muon import create_auto_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    all_placements,
    Collectives,
    EveryExchange,
    grid_of,
    local,
    mesh_of,
    OtherExchange,
    R,
    S0,
    S1,
    specs,
    Strategy,
    Twins,
)


SHAPES = [(16, 8), (9, 13), (3, 20), (5, 1)] * 3


class Relays(OtherExchange):
    """Results are relayed from two replicas on, a few shards at a time."""

    words = "relayed along replicas"

    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        # These processes make the tests of this class only.
        buckets.MAX_REPLICAS, packing.RELAY_BYTES = 1, 200
        super()._init_pg(rank, world_size, rdvz_file)

    def some_specs(self, *args):
        return specs(grid_of(4, 2), [(R, S0), (R, R)], *args)


@requires_gloo()
class TestMuonRelays(EveryExchange, Relays, MultiProcContinuousTest):
    world_size = 8

    def test_any_placement(self):
        grid = grid_of(2, 2, 2)
        for layout in (
            specs(mesh_of(8), [(R,)], SHAPES),
            specs(grid_of(4, 2), all_placements(grid_of(4, 2)), SHAPES[:4]),
            specs(grid_of(2, 4), [(R, S0), (S1, R)], SHAPES),
            specs(grid, all_placements(grid), SHAPES[:2]),
            # Groups within groups, each with replicas of its own.
            specs(grid["a"], [(R,)], SHAPES)
            + specs(grid["b", "c"], [(R, S0), (R, R)], SHAPES)
            + specs(grid, [(R, S0, R)], SHAPES),
        ):
            self.check(Twins(layout), str({spec.placements for spec in layout}))

    def test_process_groups(self):
        strategies = [
            Strategy(mesh_of(8), "ddp"),
            Strategy(grid_of(4, 2), "ddp", "fsdp"),
            Strategy(grid_of(2, 2, 2), "ddp", "fsdp", "tp"),
            Strategy(grid_of(2, 4), "fsdp", "cp"),
        ]
        for strategy in strategies:
            self.check(strategy.twins(SHAPES), str(strategy))

    def test_each_element_travels_once_and_within_one_replica(self):
        grid = grid_of(4, 2)
        twins = Twins(specs(grid, [(R, S0)], [(16, 8)] * 8))
        with Collectives() as seen:
            twins.step()
        names = {call.name for call in seen.calls}
        problems = []
        if names != {"alltoall_base_", "broadcast_", "allreduce_"}:
            problems.append(f"calls {names}")
        mine = set(grid["b"].mesh.flatten().tolist())
        for call in seen.calls:
            strangers = [
                rank
                for rank, sent in zip(call.ranks, call.sent)
                if sent and rank not in mine
            ]
            if strangers:
                problems.append(f"sends {strangers} something")
        # Half of its one matrix goes to an owner and comes back to the other rank of the replica.
        sent = sum(sum(call.sent) for call in seen.calls)
        if sent != 64 + 64 + 2:
            problems.append(f"{sent} elements sent")
        # All other matrices' halves come once: one from the own replica, six from others.
        relayed = sum(
            relay.packed.flat.numel()
            for bucket in twins.optimizer._engine.pipeline.buffers.buckets
            for relay in bucket.relays
        )
        if relayed != 8 * 65:
            problems.append(f"{relayed} elements relayed")
        self.assertEverywhere(problems)
        self.assertParity(twins)

    def test_gradient_that_one_replica_cannot_use(self):
        twins = Twins(specs(mesh_of(8), [(R,)], [(4, 6)] * 4))
        twins.set_gradients()
        if self.rank == 6:
            twins.params[1].grad = local(twins.params[1].grad)
        with self.everywhere():
            with self.assertRaisesRegex(RuntimeError, "parameter 1"):
                twins.optimizer.step()

    def test_ranks_in_different_steps(self):
        # An all-reduce of the replicas finds it, where all-to-alls meet none of them.
        twins = Twins(specs(mesh_of(8), [(R,)], [(4, 6)] * 4))
        twins.set_gradients()
        if self.rank == 3:
            twins.optimizer._engine.begin_step()
        with self.everywhere():
            with self.assertRaisesRegex(RuntimeError, "not in the same step"):
                twins.optimizer.step()

    def test_first_connections(self):
        grid = grid_of(4, 2)
        twins = Twins(specs(grid, [(R, S0)], [(16, 8)] * 8))
        twins.step()
        with Collectives() as seen:
            # What the constructor does on accelerators.
            twins.optimizer._engine.pipeline.buffers.connect()
        names = [call.name for call in seen.calls]
        problems = [] if names == ["alltoall_base_", "broadcast_"] else [names]
        partners = {
            rank for rank, n in zip(seen.calls[0].ranks, seen.calls[0].sent) if n
        }
        if partners != set(grid["b"].mesh.tolist()) - {self.rank}:
            problems.append(f"connects to {partners}")
        self.assertEverywhere(problems)

    def test_few_replicas_are_served_directly(self):
        layout = specs(grid_of(2, 4), [(R, S0)], SHAPES)
        with mock.patch.object(buckets, "MAX_REPLICAS", 2):
            twins = Twins(layout)
            with Collectives() as seen:
                twins.step()
        self.assertEverywhere([c.name for c in seen.calls if c.name[:3] != "all"])
        self.assertParity(twins)


@requires_gloo()
class TestMuonRelaysOfSixteen(Relays, MultiProcContinuousTest):
    world_size = 16

    def test_ddp_and_hsdp(self):
        for mesh, placements in (
            (mesh_of(16), (R,)),
            (grid_of(8, 2), (R, S0)),
            (grid_of(4, 4), (R, S1)),
        ):
            twins = Twins(specs(mesh, [placements], SHAPES))
            self.check(twins, str(placements))
        grid = grid_of(4, 4)
        config = create_auto_config(
            fsdp_process_group=grid.get_group(1), ddp_process_group=grid.get_group(0)
        )
        strategy = Strategy(grid, "ddp", "fsdp")
        self.check(Twins([strategy.cut(shape) for shape in SHAPES], config))


if __name__ == "__main__":
    run_tests()
