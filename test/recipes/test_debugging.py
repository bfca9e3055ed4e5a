"""Recipes for a look at a setup before a long run, or when something is wrong."""

import contextlib
import copy
import itertools
import re
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from recipes.common import average, batches, CPU, MLP, Recipe, STEPS, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.nn.functional import mse_loss
from torch.optim import Muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal.common_utils import run_tests


def check_groups(**groups):
    """Raises if the groups are not dimensions of a grid."""
    rank = dist.get_rank()
    members = {kind: dist.get_process_group_ranks(g) for kind, g in groups.items()}
    for (a, ours), (b, theirs) in itertools.combinations(members.items(), 2):
        shared = sorted(set(ours) & set(theirs))
        if shared != [rank]:
            raise ValueError(f"rank {rank}: ranks {shared} are in both {a} and {b}")


@torch.no_grad()
def compare_params(some, others, atol=0.0):
    """Whether their values differ by at most ``atol``."""
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(a, b, rtol=0.0, atol=atol) for a, b in pairs)


def create_simple_model(hidden_size=64, num_layers=2):
    """Square layers with ReLU between them, without biases."""
    layers = []
    for _ in range(num_layers):
        layers += [nn.Linear(hidden_size, hidden_size, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def sync_model_params(model):
    """Gives all ranks the parameters of the first."""
    for p in model.parameters():
        dist.broadcast(p, src=0)


@contextlib.contextmanager
def watched(store, group):
    """Says which ranks of ``group`` do not make a step.

    The group's own timeout ends the wait. A signal's handler would not run before: Python calls it
    between its own instructions, and this rank waits in the backend.
    """
    store.set(f"in step: {dist.get_rank()}", "")
    try:
        yield
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        missing = [r for r in ranks if not store.check([f"in step: {r}"])]
        raise TimeoutError(f"{missing} missing") from error


class TestDebugging(Recipe):
    def test_debug_mode(self):
        """END_TO_END, debug mode: one owner at a time, and a line per parameter and phase."""
        model, group = FSDP(Transformer(), device_id=CPU), dist.group.WORLD
        config = create_auto_config(fsdp_process_group=group)
        config.async_gpu_parallelism = False
        config.prefetch_count = 0
        with self.assertLogs("torch.optim.muon", "DEBUG") as logged:
            self.check(Transformer(), model, config, fsdp=group, data=[group])
        lines = [line for line in logged.output if ": gather " in line]
        owners = [int(re.search(r"owner (\d+)$", line)[1]) for line in lines]
        per_step = owners[: len(owners) // STEPS]
        self.assertTrue(per_step)
        self.assertEqual(per_step, sorted(per_step))

    def test_process_groups(self):
        """END_TO_END, check the process groups; TESTING, process groups checked."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = mesh.get_all_groups()
        check_groups(TP=tp, FSDP=fsdp)
        with self.assertRaisesRegex(ValueError, "are in both TP and replicate"):
            check_groups(TP=tp, replicate=tp)

    def test_comparison(self):
        """END_TO_END, compare with one process; TESTING, a simple model, parameters made equal on all
        ranks, and parameters compared."""
        torch.manual_seed(dist.get_rank())
        single = create_simple_model(hidden_size=32)
        before = copy.deepcopy(single)
        sync_model_params(single)
        same = compare_params(before.parameters(), single.parameters())
        self.assertEqual(same, dist.get_rank() == 0)
        start = copy.deepcopy(single)
        # A second model made after the same seed would start from other random numbers.
        sharded = FSDP(copy.deepcopy(single), device_id=CPU)
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        muons = (
            Muon(single.parameters(), lr=1e-3),
            Muon(sharded.parameters(), lr=1e-3, distributed_config=config),
        )
        for inputs, targets in batches():  # the same on all ranks
            for model, muon in zip((single, sharded), muons):
                mse_loss(model(inputs), targets).backward()
                muon.step()
                muon.zero_grad()
        with FSDP.summon_full_params(sharded, writeback=False):
            its = list(sharded.module.parameters())
            self.assertTrue(compare_params(single.parameters(), its, atol=1e-5))
            self.assertFalse(compare_params(start.parameters(), its, atol=1e-5))

    def test_profile(self):
        """END_TO_END, profile a step: exchanges between ranks, products of matrices."""
        model = fully_shard(Transformer())
        config = create_dtensor_config()
        muon = Muon(model.parameters(), lr=1e-3, distributed_config=config)
        inputs, targets = next(batches(dist.group.WORLD))
        mse_loss(model(inputs), targets).backward()
        muon.step()  # the first step makes buffers
        with torch.profiler.profile() as profiler:
            muon.step()
        events = {event.key: event.count for event in profiler.key_averages()}
        mine = len(muon.assignments[dist.get_rank()])
        # A gather and a scatter per bucket of many matrices, one X @ X.T per iteration.
        self.assertLess(events["c10d::alltoall_base_"], len(list(model.parameters())))
        self.assertEqual(events["aten::mm"], 5 * mine)

    def test_hang(self):
        """END_TO_END, find out who hangs: a rank leaves out a step, and the others say which."""
        group = dist.new_group(timeout=timedelta(seconds=2))
        # A store that all ranks can reach, whatever became of their process groups.
        store = dist.PrefixStore("hang", dist.distributed_c10d._get_default_store())
        model = MLP()
        config = create_auto_config(ddp_process_group=group)
        muon = Muon(model.parameters(), lr=1e-3, distributed_config=config)
        inputs, targets = next(batches())
        mse_loss(model(inputs), targets).backward()
        if dist.get_rank() != 3:
            with self.assertRaisesRegex(TimeoutError, r"\[3\] missing"):
                with watched(store, group):
                    muon.step()
        dist.barrier()

    def test_detailed_checks(self):
        """END_TO_END, logging of torch.distributed: DETAIL compares collectives first."""
        # Read at import and by this call. It counts for groups that are made after it.
        with mock.patch.dict("os.environ", TORCH_DISTRIBUTED_DEBUG="DETAIL"):
            dist.set_debug_level_from_env()
            group = dist.new_group()
        dist.set_debug_level_from_env()
        model, config = MLP(), create_auto_config(ddp_process_group=group)

        def after():
            average(model.parameters(), group)

        self.check(MLP(), model, config, data=[group], after=after)
        both = "Rank . is running.*Rank . is running"
        with self.assertRaisesRegex(RuntimeError, both):
            dist.all_reduce(torch.zeros(4 + (dist.get_rank() == 3)), group=group)

    def test_a_wrong_training_is_found(self):
        """The proof of all recipes fails if a rank forgets to average its gradients."""
        model, world = MLP(), dist.group.WORLD
        with self.assertRaisesRegex(AssertionError, "does not have the gradient"):
            self.check(MLP(), model, None, data=[world], once=False)


if __name__ == "__main__":
    run_tests()
