# Owner(s): ["oncall: distributed"]
"""Parameters that change under a Muon with a distributed_config: other parameters in their place, other
values, another placement or dtype. Frameworks do all of this after they build an optimizer.

The reference is a Muon without a config over whole matrices, to which the tests make the same changes. A
parameter that a framework sharded keeps its momentum. The momentum of another parameter starts at zero.
"""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    grid_of,
    OnCPU,
    local,
    mesh_of,
    place,
    R,
    S0,
    S1,
    Spec,
    Strategy,
    Twins,
)


# Even, uneven, and with empty pieces on four ranks.
SHAPES = [(8, 8), (7, 5), (3, 9)]


class Changing(Twins):
    """Twins of which parameters are exchanged, for others of the same momentum."""

    def __init__(self, specs, config=None):
        super().__init__(specs, config, lr=0.1)

    def replacement(self, index, spec):
        """A parameter of other values for the place of number ``index``, which is ``spec`` from now on."""
        self.specs[index], self.seeds[index] = spec, self.seeds[index] + 500
        whole = full(self.seeds[index], spec.shape, spec.dtype)
        self.singles[index].data.copy_(whole)
        return nn.Parameter(place(whole, spec))

    def replace(self, index, spec):
        self.params[index] = self.replacement(index, spec)
        self.optimizer.param_groups[0]["params"] = list(self.params)


class TestMuonReplaced(OnCPU):
    def specs(self, *placements, mesh=None, shapes=SHAPES):
        """Matrices on a mesh; plain ones, whole on each rank, without placements."""
        if not placements:
            return [Spec(shape, None, None) for shape in shapes]
        mesh = mesh_of(4) if mesh is None else mesh
        return [Spec(shape, mesh, placements) for shape in shapes]

    def trained(self, specs, config=None):
        twins = Changing(specs, config)
        twins.step()
        return twins

    def test_data_of_equal_shape(self):
        strategy = Strategy(mesh_of(4), "fsdp")
        for specs, config in [
            (self.specs(), None),
            ([strategy.cut(shape) for shape in SHAPES], strategy.config()),
        ]:
            twins = self.trained(specs, config)
            for i, param in enumerate(twins.params):
                param.data = twins.replacement(i, specs[i]).detach()
            self.assertTrainsAlike(twins, 2)

    def test_placements(self):
        """Local shapes stay the same."""
        grid = grid_of(2, 2)
        twins = self.trained([Spec((8, 8), grid, (S0, S1))])
        (param,), twins.specs = twins.params, [Spec((8, 8), grid, (S1, S0))]
        other = place(twins.singles[0].detach(), twins.specs[0])
        param._local_tensor, param._spec = other._local_tensor, other._spec
        self.assertTrainsAlike(twins, 2)

    def test_dtypes(self):
        dtype = torch.bfloat16
        twins = self.trained(self.specs(S0) + self.specs(R) + self.specs())
        model = nn.ParameterList(twins.params)
        model.zero_grad()
        model.to(dtype)
        for single in twins.singles:
            single.grad = None
            single.data = single.data.to(dtype)
            state = twins.single.state[single]
            state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
        twins.specs = [spec._replace(dtype=dtype) for spec in twins.specs]
        with self.everywhere():
            for mine, param in zip(twins.params, model, strict=True):
                self.assertIs(mine, param)
        self.assertTrainsAlike(twins, 2)

    def test_model_on_meta_is_filled_later(self):
        with torch.device("meta"):
            layers = [nn.Linear(*shape[::-1], bias=False) for shape in SHAPES]
        model = fully_shard(nn.Sequential(*layers), mesh=mesh_of(4))
        optimizer = Muon(model.parameters(), lr=0.1, distributed_config="auto")
        model.to_empty(device="cpu")
        twins = Changing(self.specs(S0))
        for param, filled in zip(model.parameters(), twins.params, strict=True):
            with torch.no_grad():
                param.to_local().copy_(filled.to_local())
        twins.params, twins.optimizer = list(model.parameters()), optimizer
        self.assertTrainsAlike(twins, 2)

    def test_change_on_one_rank_only(self):
        # This breaks the group. DTensor's caches tell its mesh from others by its name.
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("changed",))
        twins = self.trained(self.specs(S0, mesh=mesh))
        if self.rank == 3:
            twins.replace(1, twins.specs[1])
        before = [local(param.detach()).clone() for param in twins.params]
        dist.barrier()
        _set_pg_timeout(timedelta(seconds=2), group)
        found = everyone(self.outcome(twins.step))
        with self.everywhere(f"{found}"):
            self.assertEqual([kind for kind, _ in found], ["RuntimeError"] * 4)
            # It waits over the store: a collective would pair up with the others' first one.
            pattern = r"found changed parameters in step.*waiting for ranks \[0, 1, 2\]"
            self.assertRegex(found[3][1], pattern)
            for _, text in found[:3]:
                self.assertRegex(text, r"Rank 3 reports: it found changed parameters")
            for param, old in zip(twins.params, before, strict=True):
                self.assertTrue(torch.equal(local(param.detach()), old))

    def test_rebuild_makes_as_many_store_requests_on_any_number_of_ranks(self):
        """Each rank asked for each other rank: at 256 ranks, 131,840 requests."""
        requests = []
        for count in (2, 4):
            twins = self.trained([Spec((8, 8), mesh_of(count), (S0,))])
            twins.replace(0, Spec((8, 8), mesh_of(count), (S1,)))
            store = mock.Mock(wraps=distributed_c10d._get_default_store())
            with mock.patch.object(
                distributed_c10d, "_get_default_store", lambda store=store: store
            ):
                self.assertTrainsAlike(twins, 1, f"{count} ranks")
            requests.append(max(everyone(len(store.method_calls))))
        self.assertGreater(requests[0], 0)
        self.assertEqual(*requests)


if __name__ == "__main__":
    run_tests()
