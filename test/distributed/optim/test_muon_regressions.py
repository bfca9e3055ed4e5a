# Owner(s): ["oncall: distributed"]
"""Incidents of the distributed Muon, each with a case that lacks the incident's cause."""

import functools
import shutil
import tempfile
import weakref
from collections import Counter

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

    def expert(self):
        """An expert that only ranks 2 and 3 hold."""
        placed = specs(mesh_of(2), [(S0,)], [(9, 6)])
        return placed if self.rank >= 2 else []

    def step_with_partial_gradients(self, twins, dtype=torch.float32):
        """A step with gradients that need a sum over the ranks."""
        for param in twins.params:
            param.grad, param.grad_dtype = None, param.dtype
        twins.set_gradients()
        for param, single in zip(twins.params, twins.singles):
            term = single.grad if self.rank == 3 else torch.zeros_like(single.grad)
            param.grad, param.grad_dtype = None, dtype
            param.grad = DTensor.from_local(
                term.to(dtype), param.device_mesh, [Partial()], run_check=False
            )
        twins.single.step()
        twins.optimizer.step()
        self.assertParity(twins)

    # Functions of the user's

    def test_wrapped_gather_beside_parameters_of_one_rank(self):
        """A wrapped gather_fn looked ahead among all parameters, and ranks that held more got stuck."""
        shared = specs(mesh_of(4), [(S0,), (R,)], [(8, 8), (7, 5)])
        for prefetch in (0, 2):
            placed, seeds = list(shared), [0, 1, 2, 3]
            for i in range(self.rank):
                placed.insert(i + 1, Spec((4, 6), None, None))
                seeds.insert(i + 1, 50 + 10 * self.rank + i)
            config = wrapped(create_dtensor_config(prefetch_count=prefetch))
            twins = Twins(placed, config, seeds=seeds)
            self.assertTrainsAlike(twins, 2, f"{prefetch}")

    def test_wrapped_gather_and_a_piece_that_is_empty(self):
        """Under a wrapped gather_fn, a rank with an empty piece kept no momentum buffer."""
        for given in (True, False):
            placed = specs(mesh_of(4), [(S0,)], [(3, 8), (8, 8)])
            twins = Twins(placed, wrapped(create_dtensor_config()))
            twins.set_gradients()
            if self.rank == 3 and not given:
                twins.params[0].grad = None
            twins.single.step()
            twins.optimizer.step()
            self.assertParity(twins, f"gradient given: {given}")

    def test_wrapped_gather_of_a_matrix_without_columns(self):
        """Under a wrapped gather_fn, the learning rate of such a matrix was divided by zero."""
        for config in (create_dtensor_config(), wrapped(create_dtensor_config())):
            placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 0), (0, 6), (8, 8)])
            twins = Twins(placed, config, adjust_lr_fn="spectral_unclamped")
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
            twins = Twins([Spec((8, 8), mesh_of(4), (S0,)), *self.expert()])
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
            for config in (create_dtensor_config(), None):
                params = Twins(placed).params
                optimizer = Muon(params, distributed_config=config)
                optimizer.step()
                module = module_of(params)
                loaded = {"optimizer": get_optimizer_state_dict(module, optimizer)}
                dcp.load(loaded, checkpoint_id=path)
                set_optimizer_state_dict(module, optimizer, loaded["optimizer"])
                with self.everywhere(f"config: {config}"):
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
        for frozen in (True, False):
            twins = Twins(specs(mesh_of(4), [(S0,)], [(8, 8)]))
            more = torch.nn.Parameter(place(full(9, (8, 8)), twins.specs[0]))
            more.requires_grad_(not frozen)
            params = [*twins.params, *([more] if frozen else [])]
            twins.optimizer = Muon(params, distributed_config="auto")
            self.step_with_partial_gradients(twins)
            more.requires_grad_(True)
            if not frozen:
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
                self.assertTrainsAlike(Twins(specs(mesh, [(placement,)])), 1)

    # Several optimizers

    def test_twenty_optimizers_of_one_matrix_share_the_work(self):
        """All of them once chose the first rank."""
        for placement in (S0, R):
            owners = Counter()
            for i in range(20):
                param = torch.nn.Parameter(
                    place(full(i, (8, 8)), Spec((8, 8), mesh_of(4), (placement,)))
                )
                optimizer = Muon([param], distributed_config="auto")
                owners.update(optimizer.matrix_owners.values())
            with self.everywhere():
                self.assertEqual(owners, dict.fromkeys(range(4), 5))

    def test_optimizers_of_one_config(self):
        """A config served one optimizer at a time."""
        config = create_dtensor_config()
        placed = specs(mesh_of(4), [(S0,), (R,)], [(8, 8)])
        first, second = (Twins(placed, config, seed=10 * i) for i in range(2))
        for step in range(4):
            for twins, frozen in ((first, 0), (second, 1))[:: 1 if step % 2 else -1]:
                twins.step([frozen] if step > 1 else [])
                self.assertParity(twins, f"step {step}")
            if step == 1:
                # Both build a new engine.
                for twins, i in ((first, 0), (second, 1)):
                    twins.params[i].requires_grad_(False)
        with self.everywhere():
            self.assertNotIn("current_owner", config.state)

    # Bits and memory

    def test_gradients_are_freed(self):
        """After the step and zero_grad(), nothing holds a gradient."""
        for config in (create_dtensor_config(), wrapped(create_dtensor_config())):
            twins = Twins(specs(mesh_of(4), [(S0,), (R,)], [(8, 8)]), config)
            for _ in range(2):
                twins.step()
            kept = [weakref.ref(param.grad) for param in twins.params]
            twins.optimizer.zero_grad()
            with self.everywhere():
                self.assertEqual([ref() for ref in kept], [None] * 2)

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
        for dtype, ns_steps in ((torch.bfloat16, 0), (torch.float32, 0)):
            placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], [(31, 9), (9, 31)], dtype)
            self.assertTrainsAlike(Twins(placed, ns_steps=ns_steps), 2)

    def test_memory_of_an_update_in_bfloat16(self):
        """To round a bfloat16 update, several tensors of the size of the matrix were made."""
        peaks = []
        for dtype in (torch.float32, torch.bfloat16):
            twins = Twins(specs(mesh_of(4), [(R,)], [(319, 321)], dtype))
            twins.step()
            twins.set_gradients()
            with LiveBytes() as bytes_alive:
                twins.optimizer.step()
            # The two optimizers may have different owners.
            peaks.append(max(everyone(bytes_alive.peak)))
        with self.everywhere(f"{peaks} bytes"):
            self.assertLess(peaks[1] - peaks[0], 1.1 * twins.singles[0].nbytes)


@requires_gloo()
class TestMuonThreads(GlooOnCPU, ParityAssertions, MultiProcContinuousTest):
    world_size = 2

    def test_as_many_threads_as_the_single_process(self):
        """With several threads, bfloat16 updates and small matrices in batches were rounded differently."""
        rounded = specs(mesh_of(2), [(S0,)], [(250, 301)], torch.bfloat16)
        batched = specs(mesh_of(2), [(S0,)], [(96, 1024)] * 4)
        # With one thread, every other test here compares.
        torch.set_num_threads(2)
        try:
            for placed, ns_steps in ((rounded, 5), (batched, 1)):
                self.assertTrainsAlike(Twins(placed, lr=0.05, ns_steps=ns_steps), 1)
        finally:
            torch.set_num_threads(1)


if __name__ == "__main__":
    run_tests()
