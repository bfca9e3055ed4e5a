# Owner(s): ["oncall: distributed"]
"""Momentum buffers: their dtype, and what happens to those that frameworks replace, move or save."""

import copy
import io
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim._muon_engine.layouts import fitting
from torch.optim._muon_engine.runtime.params import ParamInputs
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon import common_muon
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
    def step_with_gradients_of(self, twins, dtype):
        """Both make a step with the same gradients of ``dtype``."""
        twins.steps += 1
        for index, spec in enumerate(twins.specs):
            gradient = full(twins.seeds[index] + 1000 * twins.steps, spec.shape, dtype)
            twins.singles[index].grad = gradient
            placed = gradient.clone() if spec.mesh is None else place(gradient, spec)
            twins.params[index].grad = placed
        twins.single.step()
        twins.optimizer.step()

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
        with mock.patch.object(ParamInputs, "_take_others", side_effect=AssertionError):
            self.assertTrainsAlike(twins, 2)

    def test_gradient_of_another_dtype_on_an_equal_mesh(self):
        """No collective moves it to the parameter's mesh."""
        spec = Spec((8, 6), mesh_of(4), (S0,))
        param, gradient = place(full(0, (8, 6)), spec), place(full(1, (8, 6)), spec)
        gradient = gradient.double()
        gradient._spec = copy.copy(gradient._spec)
        gradient._spec.mesh = copy.copy(spec.mesh)
        with self.everywhere():
            self.assertIsNot(gradient.device_mesh, param.device_mesh)
            self.assertEqual(fitting.moves(param, None, gradient), "")

    def test_gradients_of_another_dtype(self):
        """Momentum has the dtype of the gradients, on one process and on several."""
        for dtype, gradient_dtype in (
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float32),
            (torch.float32, torch.bfloat16),
            (torch.float32, torch.float64),
        ):
            with self.subTest(dtype=dtype, gradient_dtype=gradient_dtype):
                for may_have_any in (False, True):
                    with self.subTest(may_have_any=may_have_any):
                        placed = specs(
                            mesh_of(4), [(S0,), (S1,), (R,)], [(8, 8), (7, 5)], dtype
                        )
                        twins = Twins([*placed, Spec((6, 4), None, None, dtype)])
                        for param in (*twins.params, *twins.singles):
                            param.grad_dtype = None if may_have_any else gradient_dtype
                        for _ in range(3):
                            self.step_with_gradients_of(twins, gradient_dtype)
                        with self.everywhere(
                            f"{dtype} {gradient_dtype} {may_have_any}"
                        ):
                            for index, param in enumerate(twins.params):
                                single = twins.singles[index]
                                mine = twins.optimizer.state[param]["momentum_buffer"]
                                its = twins.single.state[single]["momentum_buffer"]
                                self.assertEqual(mine.dtype, gradient_dtype)
                                expected = common_muon.piece_of(its, twins.specs[index])
                                self.assertTrue(torch.equal(local(mine), expected))
                                expected = common_muon.piece_of(
                                    single, twins.specs[index]
                                ).detach()
                                # A bfloat16 parameter may differ by the rounding of its last addition.
                                most = 0 if dtype == torch.float32 else 2.0**-7
                                found = local(param.detach())
                                torch.testing.assert_close(
                                    found, expected, rtol=most, atol=most
                                )

    def test_ranks_whose_gradients_have_different_dtypes(self):
        param = nn.Parameter(place(full(1, (8, 8)), Spec((8, 8), mesh_of(4), (S0,))))
        param.grad_dtype = torch.float64 if self.rank == 2 else torch.float32
        build = partial(Muon, [("w", param)], distributed_config="auto")
        self.assertRaisesEverywhere(
            build, ValueError, "'w'.*grad_dtype is torch.float32"
        )

    def test_buffer_of_another_dtype(self):
        """A framework wrote it into the state. It was a raw error of torch, after which Muon refused to go on."""
        for wide in (torch.float64, torch.bfloat16):
            with self.subTest(wide=wide):
                twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)]))
                twins.step()
                for optimizer in (twins.optimizer, twins.single):
                    for state in optimizer.state.values():
                        state["momentum_buffer"] = state["momentum_buffer"].to(wide)
                self.assertTrainsAlike(twins, 2, f"{wide}")

    def test_buffers_that_cannot_be_used(self):
        """On one rank only, the other ranks waited for it until the timeout."""
        for buffer, pattern in (
            (0.5, "momentum buffer must be a Tensor but is a float"),
            (torch.zeros(8, 8, device="meta"), "momentum buffer has no data.*meta"),
            (torch.zeros(7, 8), r"momentum buffer has shape \(7, 8\)"),
        ):
            with self.subTest(pattern):
                for ranks in (range(4), (1,)):
                    with self.subTest(ranks=ranks):
                        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8)]))
                        twins.step()
                        state = twins.optimizer.state[twins.params[1]]
                        before = state["momentum_buffer"]
                        if self.rank in ranks:
                            state["momentum_buffer"] = buffer
                        starts = [
                            local(param.detach()).clone() for param in twins.params
                        ]
                        twins.set_gradients()
                        found = common_muon.everyone(self.outcome(twins.optimizer.step))
                        with self.everywhere(f"{pattern} {found}"):
                            for rank, (kind, text) in enumerate(found):
                                self.assertEqual(kind, "RuntimeError")
                                told = f"parameter 1 .*{pattern}"
                                if rank not in ranks:
                                    told = "cannot use.*parameter 1 "
                                self.assertRegex(text, told)
                            for param, start in zip(twins.params, starts, strict=True):
                                self.assertTrue(
                                    torch.equal(local(param.detach()), start)
                                )
                        # Nothing has moved, so the same step works afterwards.
                        state["momentum_buffer"] = before
                        twins.single.step()
                        twins.optimizer.step()
                        self.assertParity(twins)

    def test_loaded_momentum_keeps_the_dtype_of_gradients(self):
        """Optimizer casts it to the parameter's dtype, which rounded it in every resume."""
        twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8)], torch.bfloat16))
        for param in (*twins.params, *twins.singles):
            param.grad_dtype = torch.float32
        self.step_with_gradients_of(twins, torch.float32)
        for optimizer in (twins.optimizer, twins.single):
            with self.subTest(is_distributed=optimizer is twins.optimizer):
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
                loaded = optimizer.state_dict()["state"]
                with self.everywhere():
                    for key, kept in saved["state"].items():
                        momentum = loaded[key]["momentum_buffer"]
                        self.assertEqual(momentum.dtype, torch.float32)
                        expected = local(kept["momentum_buffer"])
                        self.assertTrue(torch.equal(local(momentum), expected))

    def test_hooks_after_a_load_have_the_last_word(self):
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,), torch.bfloat16)])
        for param in (*twins.params, *twins.singles):
            param.grad_dtype = torch.float32
        self.step_with_gradients_of(twins, torch.float32)
        muon = twins.optimizer

        def forget(optimizer):
            for state in optimizer.state.values():
                state["momentum_buffer"] = torch.zeros_like(state["momentum_buffer"])

        handle = muon.register_load_state_dict_post_hook(forget)
        muon.load_state_dict(muon.state_dict())
        handle.remove()
        momentum = local(muon.state[twins.params[0]]["momentum_buffer"])
        with self.everywhere():
            self.assertFalse(momentum.any())
            self.assertEqual(momentum.dtype, torch.float32)

    def test_first_step_without_gradients_of_any_dtype(self):
        """Momentum stayed in the parameter's dtype, and differed from that of one process."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,), torch.bfloat16)] * 2)
        for param in (*twins.params, *twins.singles):
            param.grad_dtype = None
        twins.optimizer.step()
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            with self.subTest(dtype=dtype):
                self.step_with_gradients_of(twins, dtype)
                for param, single in zip(twins.params, twins.singles, strict=True):
                    mine = twins.optimizer.state[param]["momentum_buffer"]
                    its = twins.single.state[single]["momentum_buffer"]
                    with self.everywhere(f"{dtype}"):
                        self.assertEqual(mine.dtype, dtype)
                        expected = common_muon.piece_of(its, twins.specs[0])
                        self.assertTrue(torch.equal(local(mine), expected))

    def test_replaced_twice_with_a_checkpoint_between(self):
        """The second replacement was compared with the first parameter, whose momentum the load had dropped."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,))] * 2)
        named = [("a", twins.params[0]), ("b", twins.params[1])]
        twins.optimizer = Muon(named, distributed_config="auto")
        twins.step()

        def replace():
            twins.params[1] = nn.Parameter(twins.params[1].detach().clone())
            twins.optimizer.param_groups[0]["params"][1] = twins.params[1]

        with self.assertWarnsOnce():
            replace()
            saved = copy.deepcopy(twins.optimizer.state_dict())
            twins.optimizer.load_state_dict(saved)
            replace()
            state = twins.optimizer.state_dict()["state"]
            self.assertTrainsAlike(twins, 2)
        with self.everywhere():
            self.assertIn("momentum_buffer", state[1])

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
