"""Helpers for tests of mistakes: an optimizer that one rank builds or steps in another way than the others."""

import dataclasses
import functools
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Muon
from torch.optim.muon import (
    create_dtensor_config,
)
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    mesh_of,
    R,
    S0,
    specs,
)


def parameter(spec, seed=0):
    return nn.Parameter(common_muon.place(full(seed, spec.shape, spec.dtype), spec))


def snapshot(params):
    return [common_muon.local(param.detach()).clone() for param in params]


class MistakesTestCase(common_muon.OnCPU):
    def build(self, placed, change=None, named=True, group=None, **options):
        """Makes an optimizer; ``change`` gets the list of (name, parameter) pairs."""
        pairs = [
            (f"w{index}", parameter(spec, index)) for index, spec in enumerate(placed)
        ]
        if change is not None:
            pairs = change(pairs)
        options.setdefault("distributed_config", create_dtensor_config())
        self.before = [param.detach() for _, param in pairs]
        params = pairs if named else [param for _, param in pairs]
        return Muon([{"params": params, **(group or {})}], **options)

    def assertRefused(self, kind, pattern, placed=None, **options):
        placed = self.placed() if placed is None else placed
        build = functools.partial(self.build, placed, **options)
        self.assertRaisesEverywhere(build, kind, pattern)

    def mesh_of_its_own(self, name):
        """A mesh over a new group, which a test may break. DTensor's caches know meshes by their names."""
        group = dist.new_group(timeout=timedelta(seconds=2))
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))

    def placed(self):
        return specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])

    def assertNothingMoves(self, twins, kind, pattern):
        """The next step raises on all ranks."""
        twins.set_gradients()
        before = snapshot(twins.params)
        self.assertRaisesEverywhere(twins.optimizer.step, kind, pattern)
        with self.everywhere():
            self.assertEqual(snapshot(twins.params), before)

    def assign(self, assignments):
        """A config of the factory whose assign_fn gives ``assignments``, or raises it."""

        def assign_fn(params, state):
            if isinstance(assignments, Exception):
                raise assignments
            return assignments

        return dataclasses.replace(create_dtensor_config(), assign_fn=assign_fn)

    def whole(self, *shapes):
        return [nn.Parameter(full(index, shape)) for index, shape in enumerate(shapes)]

    def give_gradients(self, params):
        for index, param in enumerate(params):
            param.grad = full(90 + index, param.shape)
