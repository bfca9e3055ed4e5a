# Owner(s): ["oncall: distributed"]
"""The core: an optimizer of DTensors needs no file of another feature, so a first patch can leave these out."""

import ast
import importlib.util
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    grid_of,
    local,
    mesh_of,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


# Process groups beyond the mesh's, FSDP1, the user's functions, relays, splits, and texts.
FEATURES = (
    "functional",
    "functions",
    "group_config",
    "layouts.collector",
    "layouts.divide",
    "layouts.exchange",
    "layouts.fsdp1",
    "layouts.fsdp2",
    "layouts.groups",
    "layouts.joins",
    "layouts.pieces",
    "layouts.round_trip",
    "layouts.tp_dims",
    "runtime.relays",
    "runtime.sums",
    "schedule.assignments",
    "schedule.relays",
    "schedule.runs",
)


def without_features():
    """As if their files did not exist: an import of one of them is an ImportError."""
    names = [f"torch.optim._muon_engine.{name}" for name in FEATURES]
    return mock.patch.dict(sys.modules, dict.fromkeys(names))


class TestMuonCoreImports(TestCase):
    def test_core_imports_no_feature_at_its_top(self):
        """A feature is imported where a config or a layout asks for it."""
        folder = Path(torch.optim.__file__).parent / "_muon_engine"
        core = 0
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            if name in FEATURES:
                continue
            core += 1
            package = ".".join(["torch.optim._muon_engine", *name.split(".")[:-1]])
            found = set()
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ImportFrom) and node.level:
                    relative = "." * node.level + (node.module or "")
                    base = importlib.util.resolve_name(relative, package)
                    found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
            features = {f"torch.optim._muon_engine.{feature}" for feature in FEATURES}
            self.assertEqual(found & features, set(), name)
        self.assertGreater(core, 15)


class TestMuonCoreAlone(common_muon.OnCPU):
    def test_features_cannot_be_imported(self):
        """The test would show nothing otherwise."""
        with without_features(), self.everywhere():
            for name in FEATURES:
                with self.subTest(name=name):
                    with self.assertRaises(ImportError):
                        __import__(f"torch.optim._muon_engine.{name}")

    def test_dtensors(self):
        for mesh, placements in (
            (mesh_of(4), [(S0,), (S1,), (R,)]),
            (grid_of(2, 2), [(S0, S1), (R, S0), (S1, R)]),
        ):
            with self.subTest(mesh=mesh, placements=placements):
                with without_features():
                    twins = Twins(specs(mesh, placements))
                    self.assertTrainsAlike(twins, 3, f"{placements}")

    def test_fully_shard(self):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
        alone = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        fully_shard(model, mesh=mesh_of(4))
        with without_features():
            muon = Muon(model.parameters(), lr=0.1, distributed_config="auto")
            single = Muon(alone, lr=0.1)
            for step in range(3):
                # Gradients of the model's own are added in another order on several ranks.
                model(full(step, (8, 6))).square().mean().backward()
                for param, its in zip(model.parameters(), alone, strict=True):
                    its.grad = param.grad.full_tensor()
                muon.step()
                single.step()
                muon.zero_grad()
        found = [param.detach().full_tensor() for param in model.parameters()]
        with self.everywhere():
            for param, its in zip(found, alone, strict=True):
                self.assertTrue(torch.equal(param, its.detach()))

    def test_errors_on_all_ranks(self):
        spec = Spec((8, 6), mesh_of(4), (S0,))
        with without_features():
            twins = Twins([spec])
            twins.step()
            twins.set_gradients()
            if self.rank == 2:
                twins.params[0].grad = None
            step = twins.optimizer.step
            self.assertRaisesEverywhere(
                step, RuntimeError, "some have none.*parameter 0"
            )
            twins.steps -= 1
            twins.step()
            self.assertParity(twins)

            other = spec._replace(shape=(8, 7)) if self.rank == 1 else spec
            pattern = "shape is .* on rank 0 and .* on rank 1"
            self.assertRaisesEverywhere(lambda: Twins([other]), ValueError, pattern)

    def test_replaced_parameters_and_checkpoints(self):
        spec = Spec((8, 6), mesh_of(4), (S0,))
        with without_features():
            twins = Twins([spec])
            twins.step()
            state = twins.optimizer.state_dict()
            self.assertIn("momentum_buffer", state["state"][0])
            twins.optimizer.load_state_dict(state)
            twins.params[0].data = twins.params[0].data.clone()
            self.assertTrainsAlike(twins, 2)
            momentum = twins.optimizer.state[twins.params[0]]["momentum_buffer"]
            with self.everywhere():
                self.assertEqual(local(momentum).shape, local(twins.params[0]).shape)


if __name__ == "__main__":
    run_tests()
