# Owner(s): ["oncall: distributed"]
"""Incidents of the distributed Muon, each with a case that lacks the incident's cause."""

import functools
import shutil
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Muon
from torch.optim._muon import muon
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest,
    requires_gloo,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_muon import (
    everyone,
    full,
    GlooOnCPU,
    LiveBytes,
    local,
    mesh_of,
    ParityAssertions,
    piece_of,
    place,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
)


@functools.cache
def swapped_mesh():
    return DeviceMesh("cpu", [1, 0, 2, 3])


def wrapped(config):
    """``config`` with a function of the user's around its gather_fn."""
    original = config.gather_fn
    config.gather_fn = lambda piece, rank, state: original(piece, rank, state)
    return config


def module_of(params):
    module = torch.nn.Module()
    for i, param in enumerate(params):
        module.register_parameter(f"w{i}", param)
    return module


@requires_gloo()
class TestMuonRegressions(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 4
    # Most of these hung.
    timeout = timedelta(seconds=30)

    def assertRaisesEverywhere(self, call, kind, pattern):
        try:
            outcome = ("", f"no error {call()}")
        except Exception as error:
            outcome = (type(error).__name__, str(error))
        for rank, (name, text) in enumerate(everyone(outcome)):
            self.assertEqual(name, kind.__name__, f"rank {rank}: {text}")
            self.assertRegex(text, pattern, f"rank {rank}")

    def expert(self):
        """An expert that only ranks 2 and 3 hold."""
        placed = specs(mesh_of(2), [(S0,)], [(9, 6)])
        return placed if self.rank >= 2 else []

    def with_expert(self):
        return Twins([Spec((8, 8), mesh_of(4), (S0,)), *self.expert()])

    def set_partial_gradients(self, twins, dtype):
        """Sets new gradients that need a sum over the ranks."""
        for param in twins.params:
            param.grad, param.grad_dtype = None, param.dtype
        twins.set_gradients()
        for param, single in zip(twins.params, twins.singles):
            term = single.grad if self.rank == 3 else torch.zeros_like(single.grad)
            param.grad, param.grad_dtype = None, dtype
            param.grad = DTensor.from_local(
                term.to(dtype), param.device_mesh, [Partial()], run_check=False
            )

    def step_with_partial_gradients(self, twins, dtype=torch.float32):
        self.set_partial_gradients(twins, dtype)
        twins.single.step()
        twins.optimizer.step()
        self.assertParity(twins)

    # Functions of the user's

    def test_wrapped_gather_beside_parameters_of_one_rank(self):
        """A wrapped gather_fn looked ahead among all parameters, and ranks that held more got stuck."""
        shared = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])
        for wrap in (lambda config: config, wrapped):
            for prefetch in (0, 1, 2):
                for others in ([0] * 4, [0, 1, 2, 3]):
                    placed, seeds = list(shared), [0, 1, 2, 3]
                    for i in range(others[self.rank]):
                        placed.insert(i + 1, Spec((4, 6), None, None))
                        seeds.insert(i + 1, 50 + 10 * self.rank + i)
                    config = wrap(create_dtensor_config(prefetch_count=prefetch))
                    twins = Twins(placed, config, seeds=seeds)
                    self.assertTrainsAlike(twins, 2, f"{prefetch} {others}")

    def test_wrapped_gather_and_a_piece_that_is_empty(self):
        """Under a wrapped gather_fn, a rank with an empty piece kept no momentum buffer."""
        for wrap in (lambda config: config, wrapped):
            for given in (True, False):
                placed = specs(mesh_of(4), [(S0,)], [(3, 8), (8, 8)])
                twins = Twins(placed, wrap(create_dtensor_config()))
                twins.set_gradients()
                if self.rank == 3 and not given:
                    twins.params[0].grad = None
                twins.single.step()
                twins.optimizer.step()
                self.assertParity(twins, f"gradient given: {given}")

    def test_wrapped_gather_of_a_matrix_without_columns(self):
        """Under a wrapped gather_fn, the learning rate of such a matrix was divided by zero."""
        for adjust in (None, "spectral_unclamped"):
            for wrap in (lambda config: config, wrapped):
                placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 0), (0, 6), (8, 8)])
                twins = Twins(
                    placed, wrap(create_dtensor_config()), adjust_lr_fn=adjust
                )
                for _ in range(2):
                    twins.set_gradients()
                    # One process divides by zero there, as stock Muon does.
                    twins.singles[0].grad = twins.singles[3].grad = None
                    twins.single.step()
                    twins.optimizer.step()
                    self.assertParity(twins)

    # Parameters that some ranks add

    def test_expert_added_by_its_holders(self):
        """add_param_group on the holders of an expert waited for ranks that hold no piece of it."""
        twins = Twins([Spec((8, 8), mesh_of(4), (S0,))])
        twins.step()
        for spec in self.expert():
            whole = full(1, spec.shape)
            twins.specs.append(spec)
            twins.seeds.append(1)
            twins.singles.append(torch.nn.Parameter(whole.clone()))
            twins.params.append(torch.nn.Parameter(place(whole, spec)))
            twins.single.add_param_group({"params": twins.singles[1:]})
        # The others add an empty group: all ranks that share a matrix make a change together.
        twins.optimizer.add_param_group({"params": twins.params[1:]})
        self.assertTrainsAlike(twins, 2)

    # Checkpoints

    def test_checkpoint_after_a_step_of_the_experts_only(self):
        """Ranks without momentum made the step that a checkpoint asks for; others had some, and did not."""
        for missing in ((), (0,)):
            twins = self.with_expert()
            twins.step(missing)
            for param in twins.params:
                param.grad = None
            module = module_of(twins.params)
            state = get_optimizer_state_dict(module, twins.optimizer)["state"]
            with self.everywhere():
                self.assertEqual(sorted(state), sorted(dict(module.named_parameters())))
                for kept in state.values():
                    self.assertIn("momentum_buffer", kept)
            twins.step()
            self.assertParity(twins, f"missing at first: {missing}")

    def test_checkpoint_loaded_after_a_step_without_gradients(self):
        """After a step without gradients, a checkpoint was loaded without its momentum."""
        placed = [Spec((8, 8), mesh_of(n), (S0,)) for n in (4, 2)]
        trained = Twins(placed)
        trained.step()
        for param in trained.params:
            param.grad = None
        (path, *_) = everyone(tempfile.mkdtemp() if self.rank == 0 else None)
        try:
            module, optimizer = module_of(trained.params), trained.optimizer
            saved = {"optimizer": get_optimizer_state_dict(module, optimizer)}
            dcp.save(saved, checkpoint_id=path)
            for distributed, stepped in [(1, 0), (1, 1), (0, 0), (0, 1)]:
                params = Twins(placed).params
                config = create_dtensor_config() if distributed else None
                optimizer = Muon(params, distributed_config=config)
                if stepped:
                    optimizer.step()
                module = module_of(params)
                loaded = {"optimizer": get_optimizer_state_dict(module, optimizer)}
                dcp.load(loaded, checkpoint_id=path)
                set_optimizer_state_dict(module, optimizer, loaded["optimizer"])
                with self.everywhere(f"config: {distributed}, stepped: {stepped}"):
                    for param, single, spec in zip(params, trained.singles, placed):
                        its = trained.single.state[single]["momentum_buffer"]
                        its = piece_of(its, spec)
                        mine = local(optimizer.state[param]["momentum_buffer"])
                        self.assertTrue(torch.equal(mine, its))
        finally:
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(path)

    def test_step_without_gradients_and_an_empty_first_group(self):
        """A step without gradients took the first parameter of the first group, which had none."""
        placed = [Spec((8, 8), mesh_of(n), (S0,)) for n in (4, 2)]
        for groups in ([([0], {}), ([1], {})], [([], {}), ([0], {}), ([1], {})]):
            twins = Twins(placed, groups=groups)
            with self.everywhere():
                twins.step([0, 1])
            twins.step()
            self.assertParity(twins, f"{len(groups)} groups")

    # Gradients of another placement or dtype than their parameters

    def test_gradients_that_are_wider_than_their_parameters(self):
        """The sum of float32 gradients of a bfloat16 parameter was made in bfloat16 on one rank."""
        placed = specs(mesh_of(4), [(S0,)], [(64, 64)], torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float32):
            twins = Twins(placed)
            self.step_with_partial_gradients(twins, dtype)
            self.step_with_partial_gradients(twins, dtype)

    def test_gradients_placed_otherwise_after_a_change(self):
        """After a change of parameters, Muon forgot the placement of gradients."""
        for what in ("nothing", "add_param_group", "unfreeze"):
            twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)]))
            more = torch.nn.Parameter(place(full(9, (8, 8)), twins.specs[0]))
            more.requires_grad_(what != "unfreeze")
            params = [*twins.params, *([more] if what == "unfreeze" else [])]
            config = create_dtensor_config()
            twins.optimizer = Muon(params, distributed_config=config)
            self.step_with_partial_gradients(twins)
            more.requires_grad_(True)
            if what == "add_param_group":
                twins.optimizer.add_param_group({"params": [more]})
            self.step_with_partial_gradients(twins)

    # Building

    def test_ranks_that_order_their_mesh_differently(self):
        """Ranks whose meshes had another order agreed, and put the pieces of a matrix in wrong places."""
        swapped, usual = swapped_mesh(), mesh_of(4)
        mine = swapped if self.rank % 2 else usual
        for placement in (S0, S1):
            self.assertRaisesEverywhere(
                lambda: Twins(specs(mine, [(placement,)])),
                ValueError,
                "ranks disagree about parameter 0.*on rank 0 and .* on rank 1",
            )
            for mesh in (swapped, usual):
                self.assertTrainsAlike(Twins(specs(mesh, [(placement,)])))

    def test_config_that_serves_several_optimizers(self):
        """A config served one optimizer at a time."""
        there = [
            specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)]),
            specs(mesh_of(2), [(S1,)], [(3, 9), (16, 4), (5, 5)]),
        ]
        for wrap in (lambda config: config, wrapped):
            config = wrap(create_dtensor_config())
            all_twins = [
                Twins(placed, config, seed=100 * i) for i, placed in enumerate(there)
            ]
            for frozen in (False, True, False):
                # Each is rebuilt while the other one is as it was.
                for twins in all_twins:
                    twins.params[0].requires_grad_(not frozen)
                    for other in all_twins:
                        missing = [0] if not other.params[0].requires_grad else []
                        other.step(missing)
                        self.assertParity(other, f"frozen: {frozen}")

    def test_config_of_an_optimizer_and_the_functional_form(self):
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])
        options = {
            "lr": 0.1,
            "weight_decay": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "ns_coefficients": (3.4445, -4.7750, 2.0315),
            "ns_steps": 5,
            "eps": 1e-7,
            "adjust_lr_fn": None,
        }
        twins = Twins(placed, **options)
        optimizer = Twins(placed, twins.config, seed=50)
        plain = [p.detach().clone() for p in twins.params]
        bufs = [torch.zeros_like(p) for p in plain]
        for step in range(3):
            twins.step()
            grads = [p.grad for p in twins.params]
            config = twins.config
            muon(
                plain,
                grads,
                bufs,
                **options,
                has_complex=False,
                distributed_config=config,
            )
            optimizer.step()
            self.assertParity(twins, f"step {step}")
            self.assertParity(optimizer, f"step {step}")
            with self.everywhere(f"step {step}"):
                for mine, its in zip(plain, twins.params):
                    self.assertTrue(torch.equal(local(mine), local(its.detach())))

    # Bits and memory

    def test_matrices_without_elements_in_one_batch(self):
        """Several such matrices could not share a batch."""
        placed = specs(mesh_of(4), [(S0,), (R,)], [(0, 1), (0, 6)] * 2)
        placed += [Spec((0, 6), None, None)] * 2
        for foreach in (True, False):
            twins = Twins(placed, foreach=foreach)
            twins.step()
            self.assertParity(twins)

    def test_no_iterations(self):
        """Without iterations, the update of a tall matrix is no transpose, but was rounded as one."""
        shapes = [(31, 9), (9, 31), (250, 33), (16, 1)]
        for dtype in (torch.bfloat16, torch.float32):
            for ns_steps in (0, 1):
                placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], shapes, dtype)
                self.assertTrainsAlike(Twins(placed, ns_steps=ns_steps))

    def test_memory_of_an_update_in_bfloat16(self):
        """To round a bfloat16 update, several tensors of the size of the matrix were made."""
        for shape in [(640, 640), (639, 641), (641, 639)]:
            peaks = []
            for dtype in (torch.float32, torch.bfloat16):
                twins = Twins(specs(mesh_of(4), [(R,)], [shape], dtype))
                twins.step()
                twins.set_gradients()
                with LiveBytes() as bytes_alive:
                    twins.optimizer.step()
                # The two optimizers may have different owners.
                peaks.append(max(everyone(bytes_alive.peak)))
            with self.everywhere(f"{shape}, {peaks} bytes"):
                self.assertLess(peaks[1] - peaks[0], 1.1 * twins.singles[0].nbytes)


@requires_gloo()
class TestMuonThreads(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 2

    def test_as_many_threads_as_the_single_process(self):
        """With several threads, bfloat16 updates and small matrices in batches were rounded differently."""
        rounded = specs(mesh_of(2), [(S0,)], [(250, 301)] * 2, torch.bfloat16)
        batched = specs(mesh_of(2), [(S0,)], [(96, 1024)] * 8)
        # With one thread, every other test here compares.
        torch.set_num_threads(2)
        try:
            for placed, ns_steps in ((rounded, 5), (batched, 1)):
                self.assertTrainsAlike(Twins(placed, lr=0.05, ns_steps=ns_steps), 1)
        finally:
            torch.set_num_threads(1)


if __name__ == "__main__":
    run_tests()
