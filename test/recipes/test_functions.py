"""Recipes for the update rule, and for functions of a user's own."""

import pickle

import torch
import torch.distributed as dist
from recipes.common import average, batches, CPU, cut_linears, MLP, Recipe, Transformer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
from torch.nn.functional import mse_loss
from torch.optim import Muon
from torch.optim._muon import (
    _single_tensor_muon,
    _zeropower_via_newtonschulz,
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    muon,
)
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.common_config import FUNCTIONAL
from torch.testing._internal.distributed._muon.common_rules import Recorder


COEFFICIENTS = (DEFAULT_A, DEFAULT_B, DEFAULT_C)


@torch.no_grad()
def muon_step(params, momentum_buffers, lr, beta, weight_decay=0.0, nesterov=False):
    """The algorithm. Only the orthogonalization needs the whole matrix."""
    for param, momentum_buffer in zip(params, momentum_buffers):
        # An average, and in place: the buffer must outlive the step.
        grad = param.grad
        momentum_buffer.lerp_(grad, 1 - beta)
        mixed = grad.lerp(momentum_buffer, beta) if nesterov else momentum_buffer
        update = _zeropower_via_newtonschulz(mixed, COEFFICIENTS, 5, EPS)
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
        whole, *_ = self.check(MLP, 0.01, 0.0, nesterov=False)
        halves = [
            _zeropower_via_newtonschulz(half, COEFFICIENTS, 5, EPS)
            for half in whole.chunk(2)
        ]
        right = _zeropower_via_newtonschulz(whole, COEFFICIENTS, 5, EPS)
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
        model, config = fully_shard(MLP()), create_dtensor_config()
        shards, wholes = list(model.parameters()), list(MLP().parameters())
        mine, its = ([torch.zeros_like(p) for p in ps] for ps in (shards, wholes))
        for inputs, targets in batches(dist.group.WORLD):
            model.zero_grad()
            mse_loss(model(inputs), targets).backward()
            grads = [p.grad for p in shards]
            whole_grads = [grad.full_tensor() for grad in grads]
            with torch.no_grad():
                muon(shards, grads, mine, distributed_config=config, **FUNCTIONAL)
                _single_tensor_muon(wholes, whole_grads, its, **FUNCTIONAL)
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

        def after():
            average(model.parameters(), world)

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
        model, shards = MLP(), MLP()
        for linear in shards.children():
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
        self.compare(MLP(), shards, muon, fsdp=world, data=[world], backward=backward)
        self.assertEqual(seen.names, [])

    def test_own_functions_to_auto_config(self):
        """END_TO_END, from a user's own functions to two groups."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
        fsdp, tp = mesh.get_all_groups()
        tp_dims = dict(enumerate([0, 1, 0, 1] * 2))

        def my_gather(piece, rank, state):
            # FSDP cut the pieces of TP, so its pieces are joined first.
            whole, dim = piece, tp_dims[state["current_param_idx"]]
            for group, along in ((fsdp, 0), (tp, dim)):
                parts = [torch.empty_like(whole) for _ in range(group.size())]
                dist.all_gather(parts, whole.contiguous(), group=group)
                whole = torch.cat(parts, along)
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
            owned = {rank: [] for rank in range(state["world_size"])}
            for index in sorted(range(len(params)), key=lambda i: -sizes[i]):
                least = min(owned, key=lambda r: sum(sizes[i] for i in owned[r]))
                owned[least].append(index)
            return owned

        config = create_auto_config(fsdp_process_group=world, module=model)
        config.assign_fn = assign_by_size
        config.state |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        muon = Muon(model.parameters(), lr=0.01, distributed_config=config)
        self.compare(Transformer(), model, muon, fsdp=world, data=[world])
        owned = muon.assignments.values()
        self.assertEqual(len({sum(sizes[i] for i in indices) for indices in owned}), 1)


if __name__ == "__main__":
    run_tests()
