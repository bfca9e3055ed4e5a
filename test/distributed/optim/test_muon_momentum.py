# Owner(s): ["oncall: distributed"]
"""Momentum buffers: their dtype, and what happens to those that frameworks replace, move or save."""

import copy
import io
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder
from torch.testing._internal.distributed._muon.common_muon import (
    full,
    local,
    mesh_of,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


class TestMuonMomentum(common_muon.OnCPU):
    def test_mesh_of_a_checkpoint(self):
        """Unpickled momentum has an equal mesh, which is another object. Each step took it for another placement."""
        twins = Twins([Spec((8, 6), mesh_of(4), (S0,))])
        twins.step()
        state = twins.optimizer.state[twins.params[0]]
        momentum = state["momentum_buffer"]
        spec = copy.copy(momentum._spec)
        spec.mesh = copy.copy(spec.mesh)
        other = DTensor(momentum._local_tensor, spec, requires_grad=False)
        with self.everywhere():
            self.assertIsNot(other.device_mesh, momentum.device_mesh)
            self.assertEqual(other.device_mesh, momentum.device_mesh)
        state["momentum_buffer"] = other
        with Recorder() as seen:
            self.assertTrainsAlike(twins, 2)
        # DTensor's collectives would have moved it.
        self.assertEqual(seen.functional, [])

    def test_ranks_whose_gradients_have_different_dtypes(self):
        param = nn.Parameter(place(full(1, (8, 8)), Spec((8, 8), mesh_of(4), (S0,))))
        param.grad_dtype = torch.float64 if self.rank == 2 else torch.float32
        build = partial(Muon, [("w", param)], distributed_config="auto")
        self.assertRaisesEverywhere(
            build, ValueError, "'w'.*grad_dtype is torch.float32"
        )

    def test_buffers_that_cannot_be_used(self):
        """On one rank only, the other ranks waited for it until the timeout."""
        for buffer, pattern in (
            (0.5, "momentum buffer must be a Tensor but is a float"),
            (torch.zeros(8, 8, device="meta"), "momentum buffer has no data.*meta"),
        ):
            with self.subTest(pattern):
                twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8)]))
                twins.step()
                state = twins.optimizer.state[twins.params[1]]
                before = state["momentum_buffer"]
                told = "cannot use.*parameter 1 "
                if self.rank == 1:
                    state["momentum_buffer"] = buffer
                    told = f"parameter 1 .*{pattern}"
                twins.set_gradients()
                step = twins.optimizer.step
                self.assertRaisesEverywhere(step, RuntimeError, told)
                # Nothing has moved, so the same step works afterwards.
                state["momentum_buffer"] = before
                twins.single.step()
                step()
                self.assertParity(twins)

    def test_loaded_momentum_keeps_the_dtype_of_gradients(self):
        """Optimizer casts it to the parameter's dtype, which rounded it in every resume."""
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8)], torch.bfloat16)
        twins = Twins(placed, grad_dtype=torch.float32)
        twins.step()
        for optimizer in (twins.optimizer, twins.single):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.assertParity(twins)
        with self.everywhere():
            for state in twins.optimizer.state.values():
                self.assertEqual(state["momentum_buffer"].dtype, torch.float32)

    def test_first_step_without_gradients_of_any_dtype(self):
        """Momentum stayed in the parameter's dtype, and differed from that of one process."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,), torch.bfloat16)] * 2)
        for param in (*twins.params, *twins.singles):
            param.grad_dtype = None
        twins.optimizer.step()
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            with self.subTest(dtype=dtype):
                twins.grad_dtype = dtype
                twins.step()
                for param, single in zip(twins.params, twins.singles, strict=True):
                    mine = twins.optimizer.state[param]["momentum_buffer"]
                    its = twins.single.state[single]["momentum_buffer"]
                    with self.everywhere(f"{dtype}"):
                        self.assertEqual(mine.dtype, dtype)
                        expected = common_muon.piece_of(its, twins.specs[0])
                        self.assertTrue(torch.equal(local(mine), expected))

    def test_momentum_that_starts_again_is_said_once(self):
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,))] * 2)
        twins.step()
        twins.params[1] = nn.Parameter(twins.params[1].detach().clone())
        twins.optimizer.param_groups[0]["params"][1] = twins.params[1]
        with self.assertWarnsOnce("starts at zero"):
            twins.optimizer.state_dict()
            twins.optimizer.state_dict()
            twins.set_gradients()
            twins.optimizer.step()

    def test_replaced_parameter_in_a_checkpoint(self):
        """The checkpoint of a step that came before the next one lacked its momentum."""
        spec = Spec((8, 8), mesh_of(4), (S0,))
        for named, is_lost in ((True, False), (False, True)):
            with self.subTest(named=named, is_lost=is_lost):
                twins = Twins([spec, spec])
                if named:
                    twins.optimizer = Muon(
                        [("a", twins.params[0]), ("b", twins.params[1])],
                        distributed_config="auto",
                    )
                twins.step()
                old = twins.params[1]
                twins.params[1] = nn.Parameter(old.detach().clone())
                twins.optimizer.param_groups[0]["params"][1] = twins.params[1]
                with self.assertWarnsOnce("starts at zero" if is_lost else None):
                    saved = copy.deepcopy(twins.optimizer.state_dict())
                kept = twins.optimizer.state[old]["momentum_buffer"]
                with self.everywhere(f"named: {named}"):
                    if is_lost:
                        # Another layer of equal shape, for all that is known.
                        self.assertNotIn(1, saved["state"])
                    else:
                        mine = saved["state"][1]["momentum_buffer"]
                        self.assertTrue(torch.equal(local(mine), local(kept)))
                if not is_lost:
                    twins.optimizer.load_state_dict(saved)
                    self.assertTrainsAlike(twins, 2)

    def test_momentum_that_changed_its_placement_can_be_saved(self):
        """It was a view of the whole gathered matrix, which every rank kept. Saving it failed on ranks from 1 on."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,))])
        twins.step()
        state = twins.optimizer.state[twins.params[0]]
        for placement in (S1, R):
            with self.subTest(placement=placement):
                moved = state["momentum_buffer"].redistribute(mesh_of(4), [placement])
                state["momentum_buffer"] = moved
                twins.step()
                self.assertParity(twins)
                momentum = state["momentum_buffer"]
                with self.everywhere(f"{placement}"):
                    stored = momentum.to_local().untyped_storage().nbytes()
                    self.assertEqual(stored, momentum.to_local().nbytes)
                    torch.save(twins.optimizer.state_dict(), io.BytesIO())
                    copy.deepcopy(twins.optimizer.state_dict())


if __name__ == "__main__":
    run_tests()
