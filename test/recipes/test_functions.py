"""Recipes for the update rule, for functions of a user's own, and for a look at a setup."""

import copy
import functools
import itertools
import pickle
import re
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from recipes.common import average, batches, CPU, cut_linears, FeedForward, joined
from recipes.common import mlp, Recipe, STEPS, Transformer
from torch import nn
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.distributed.tensor import Shard
from torch.nn.functional import mse_loss
from torch.optim import Muon
from torch.optim._muon import _single_tensor_muon, _zeropower_via_newtonschulz, muon
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.optim.muon import DistributedConfig
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    FUNCTIONAL,
)
from torch.testing._internal.distributed._muon.checkers.recorder import Recorder


@torch.no_grad()
def muon_step(params, momentum_buffers, lr, beta, weight_decay=0.0, nesterov=False):
    """The algorithm. Only the orthogonalization needs the whole matrix."""
    for param, momentum_buffer in zip(params, momentum_buffers):
        # An average, and in place: the buffer must outlive the step.
        grad = param.grad
        momentum_buffer.lerp_(grad, 1 - beta)
        mixed = grad.lerp(momentum_buffer, beta) if nesterov else momentum_buffer
        update = _zeropower_via_newtonschulz(mixed, COEFFICIENTS, 5, 1e-7)
        rows, columns = param.shape
        param.mul_(1 - lr * weight_decay)
        param.add_(update, alpha=-lr * max(1, rows / columns) ** 0.5)


class TestOneProcess(TestCase):
    def check(self, make, lr, weight_decay, nesterov):
        """Trains ``make``'s model with Muon, and next to it by the rule written out."""
        model, by_hand = make(), make()
        options = {"weight_decay": weight_decay, "nesterov": nesterov}
        optimizer = Muon(model.parameters(), lr=lr, momentum=0.95, **options)
        params = list(by_hand.parameters())
        momentum_buffers = [torch.zeros_like(p) for p in params]
        for inputs, targets in batches():
            mse_loss(model(inputs), targets).backward()
            for p, q in zip(model.parameters(), params):
                q.grad = p.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
            muon_step(params, momentum_buffers, lr, 0.95, **options)
        for p, q in zip(model.parameters(), params):
            self.assertTrue(torch.equal(p, q))
        return momentum_buffers

    def test_update_rule(self):
        """PROJECT, the step of Muon: halves that are orthogonalized alone are wrong."""
        whole, *_ = self.check(mlp, 0.01, 0.0, nesterov=False)
        halves = [
            _zeropower_via_newtonschulz(half, COEFFICIENTS, 5, 1e-7)
            for half in whole.chunk(2)
        ]
        right = _zeropower_via_newtonschulz(whole, COEFFICIENTS, 5, 1e-7)
        self.assertGreater((torch.cat(halves) - right).norm(), 0.1 * right.norm())

    def test_baseline(self):
        """END_TO_END, one process, no config; EXAMPLES, migrations 1 and 2, before."""
        self.check(Transformer, 1e-3, 0.1, nesterov=True)


def round_robin(params, state):
    count = state["world_size"]
    return {rank: list(range(rank, len(params), count)) for rank in range(count)}


class Framework:
    """A framework without process groups: its ranks exchange values over a store."""

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store, self.count = dist.distributed_c10d._get_default_store(), 0

    def exchange(self, value):
        """The values of all ranks."""
        self.count += 1
        keys = [f"framework {self.count} {rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], pickle.dumps(value))
        return [pickle.loads(self.store.get(key)) for key in keys]

    def join(self, piece):
        return torch.cat(self.exchange(piece))

    def cut(self, whole):
        return whole.chunk(self.size)[self.rank].clone()


class TestFunctions(Recipe):
    def test_unified(self):
        """END_TO_END, one implementation: only the config tells one process from many."""
        model, config = fully_shard(mlp()), create_dtensor_config()
        shards, wholes = list(model.parameters()), list(mlp().parameters())
        mine, its = ([torch.zeros_like(p) for p in ps] for ps in (shards, wholes))
        inputs, targets = next(batches(dist.group.WORLD))
        mse_loss(model(inputs), targets).backward()
        grads = [p.grad for p in shards]
        with torch.no_grad():
            muon(shards, grads, mine, distributed_config=config, **FUNCTIONAL)
            grads = [grad.full_tensor() for grad in grads]
            _single_tensor_muon(wholes, grads, its, **FUNCTIONAL)
        for shard, whole in (*zip(shards, wholes), *zip(mine, its)):
            self.assertTrue(torch.equal(shard.detach().full_tensor(), whole))

    def test_functions(self):
        """EXAMPLES, custom functions for replicas: the owner broadcasts its result."""

        def assign_fn(params, state):
            return {0: [0, 1], 1: [2, 3]}  # the other ranks own nothing

        def gather_fn(tensor, rank, state):
            return tensor

        def redistribute_fn(update, rank, state):
            # All ranks call this for each parameter; ``rank`` is the owner's. A function that
            # returned its argument would apply zeros on the other ranks.
            dist.broadcast(update, src=rank)
            return update

        state = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        config = DistributedConfig(assign_fn, gather_fn, redistribute_fn, state)
        model, world = Transformer(layers=1), dist.group.WORLD
        after = functools.partial(average, list(model.parameters()), world)
        self.check(Transformer(layers=1), model, config, data=[world], after=after)

    def test_other_framework(self):
        """END_TO_END, a framework of a user's own: Muon starts no collective itself."""
        framework = Framework()

        def redistribute_fn(update, rank, state):
            return framework.cut(framework.exchange(update)[rank])

        config = DistributedConfig(
            assign_fn=round_robin,
            gather_fn=lambda piece, rank, state: framework.join(piece),
            redistribute_fn=redistribute_fn,
            state={"rank": framework.rank, "world_size": framework.size},
        )
        model, shards = mlp(), mlp()
        for linear in shards[::2]:
            linear.weight = nn.Parameter(framework.cut(linear.weight.detach()))
            linear.weight.is_rows = True
        muon = Muon(shards.parameters(), lr=1e-3, distributed_config=config)
        seen = Recorder()
        muon.register_step_pre_hook(lambda *_: seen.__enter__() and None)
        muon.register_step_post_hook(lambda *_: seen.__exit__(None, None, None))

        def backward(inputs, targets):
            pairs = list(zip(shards.parameters(), model.parameters()))
            for shard, param in pairs:
                param.data.copy_(framework.join(shard.detach()))
            model.zero_grad()
            mse_loss(model(inputs), targets).backward()
            for shard, param in pairs:
                grads = framework.exchange(param.grad)
                shard.grad = framework.cut(sum(grads) / framework.size)

        world = dist.group.WORLD
        self.compare(mlp(), shards, muon, fsdp=world, data=[world], backward=backward)
        self.assertEqual(seen.names, [])

    def test_own_functions_to_auto_config(self):
        """END_TO_END, from a user's own functions to two groups."""
        _, fsdp, tp = self.grid("fsdp", "tp")
        tp_dims = dict(enumerate([0, 1, 0, 1] * 2))

        def my_gather(piece, rank, state):
            # FSDP cut the pieces of TP, so its pieces are joined first.
            whole, dim = piece, tp_dims[state["current_param_idx"]]
            for group, along in ((fsdp, 0), (tp, dim)):
                whole = joined(whole, group, Shard(along))
            return whole

        def my_redistribute(update, rank, state):
            dist.broadcast(update, src=rank)  # more than every rank needs
            dim = tp_dims[state["current_param_idx"]]
            piece = update.chunk(tp.size(), dim)[tp.rank()]
            return piece.chunk(fsdp.size())[fsdp.rank()]

        state = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        groups = {"fsdp_process_group": fsdp, "tp_process_group": tp}
        for config in (
            DistributedConfig(round_robin, my_gather, my_redistribute, state),
            create_auto_config(tp_dim_per_param=tp_dims, **groups),
        ):
            model = cut_linears(Transformer(), tp, fsdp=fsdp)
            how = {"fsdp": fsdp, "tp": tp, "data": [fsdp]}
            self.check(Transformer(), model, config, **how)

    def test_size_aware(self):
        """END_TO_END, assignment by size: one's own ``assign_fn`` on a factory's config."""
        model, world = Transformer(), dist.group.WORLD
        # Before FSDP hides them: its slices differ in size between ranks.
        sizes = [p.numel() for p in model.parameters()]
        model = FSDP(model, device_id=CPU, use_orig_params=True)

        def assign_by_size(params, state):
            owned = {rank: [] for rank in range(world.size())}
            for index in sorted(range(len(params)), key=lambda i: -sizes[i]):
                least = min(owned, key=lambda r: sum(sizes[i] for i in owned[r]))
                owned[least].append(index)
            return owned

        config = create_auto_config(fsdp_process_group=world, module=model)
        config.assign_fn = assign_by_size
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        self.compare(Transformer(), model, muon, fsdp=world, data=[world])
        owned = muon.assignments.values()
        self.assertEqual(len({sum(sizes[i] for i in indices) for indices in owned}), 1)


def check_groups(**groups):
    """Raises if the groups are not dimensions of a grid."""
    rank = dist.get_rank()
    members = {kind: dist.get_process_group_ranks(g) for kind, g in groups.items()}
    for (a, ours), (b, theirs) in itertools.combinations(members.items(), 2):
        shared = sorted(set(ours) & set(theirs))
        if shared != [rank]:
            raise ValueError(f"rank {rank}: ranks {shared} are in both {a} and {b}")


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
        _, fsdp, tp = self.grid("fsdp", "tp")
        check_groups(TP=tp, FSDP=fsdp)
        with self.assertRaisesRegex(ValueError, "are in both TP and replicate"):
            check_groups(TP=tp, replicate=tp)

    def test_comparison(self):
        """END_TO_END, compare with one process; TESTING, a simple model, parameters made equal on all
        ranks, and parameters compared."""
        torch.manual_seed(dist.get_rank())
        single = FeedForward()
        for p in single.parameters():
            before = p.detach().clone()
            dist.broadcast(p.detach(), src=0)
            self.assertEqual(torch.equal(p, before), dist.get_rank() == 0)
        # A second model made after the same seed would start from other random numbers.
        sharded = FSDP(copy.deepcopy(single), device_id=CPU)
        config = create_auto_config(fsdp_process_group=dist.group.WORLD)
        muons = (
            Muon(single.parameters(), lr=1e-3),
            Muon(sharded.parameters(), lr=1e-3, distributed_config=config),
        )
        for inputs, targets in batches():  # the same on all ranks
            for model, optimizer in zip((single, sharded), muons):
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        with FSDP.summon_full_params(sharded, writeback=False):
            its, near = list(sharded.module.parameters()), {"atol": 1e-5, "rtol": 0}
            self.assertEqual(list(single.parameters()), its, **near)

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
        """END_TO_END, find out who hangs: a rank leaves out a step, and the others say which.

        The group's own timeout ends the wait. A signal's handler would not run before: Python calls it
        between its own instructions, and this rank waits in the backend.
        """
        group = dist.new_group(timeout=timedelta(seconds=2))
        # A store that all ranks can reach, whatever became of their process groups.
        store = dist.PrefixStore("hang", dist.distributed_c10d._get_default_store())
        model = mlp()
        config = create_auto_config(ddp_process_group=group)
        muon = Muon(model.parameters(), lr=1e-3, distributed_config=config)
        inputs, targets = next(batches())
        mse_loss(model(inputs), targets).backward()
        if dist.get_rank() != 3:
            store.set(f"in step: {dist.get_rank()}", "")
            with self.assertRaises(RuntimeError):
                muon.step()
            missing = [
                rank for rank in range(4) if not store.check([f"in step: {rank}"])
            ]
            self.assertEqual(missing, [3])
        dist.barrier()

    def test_detailed_checks(self):
        """END_TO_END, logging of torch.distributed: DETAIL compares collectives first."""
        # Read at import and by this call. It counts for groups that are made after it.
        with mock.patch.dict("os.environ", TORCH_DISTRIBUTED_DEBUG="DETAIL"):
            dist.set_debug_level_from_env()
            group = dist.new_group()
        dist.set_debug_level_from_env()
        model, config = mlp(), create_auto_config(ddp_process_group=group)
        after = functools.partial(average, list(model.parameters()), group)
        self.check(mlp(), model, config, data=[group], after=after)
        both = "Rank . is running.*Rank . is running"
        with self.assertRaisesRegex(RuntimeError, both):
            dist.all_reduce(torch.zeros(4 + (dist.get_rank() == 3)), group=group)

    def test_a_wrong_training_is_found(self):
        """The proof of all recipes fails if a rank forgets to average its gradients."""
        model, world = mlp(), dist.group.WORLD
        with self.assertRaisesRegex(AssertionError, "does not have the gradient"):
            self.check(mlp(), model, None, data=[world], once=False)
