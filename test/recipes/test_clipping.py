"""Recipes for clipping where gradients are on several meshes: torch's own function fails there."""

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import torch
from recipes.common import batch, FeedForward, Recipe, Transformer, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, parallel, Replicate
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.muon import partition_parameters


EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    """A script of ``examples`` as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec.loader.exec_module(module)
    return module


def parallelized(model, mesh):
    """The first linear layer by columns, and the other one whole."""
    plan = {"0": parallel.ColwiseParallel(output_layouts=Replicate())}
    return parallel.parallelize_module(model, mesh, plan)


class TestClipping(Recipe):
    def test_gradients_of_adamw_only(self):
        """Guide, clipping: the gradients of all parameters cannot be clipped together. Those of AdamW can,
        and Muon's stay as they are."""
        experts, *_ = self.grid("ep", "fsdp")
        on_two_meshes = nn.Sequential(nn.Linear(WIDTH, WIDTH), FeedForward())
        fully_shard(on_two_meshes[1], mesh=experts["fsdp"])
        fully_shard(on_two_meshes)

        with_plain_tensors = nn.Sequential(nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH))
        parallelized(with_plain_tensors, init_device_mesh("cpu", (4,)))
        # AdamW's parameters are of one kind.
        with_plain_tensors[0].bias = None

        for model, error in (
            (on_two_meshes, "must have the same mesh"),
            (with_plain_tensors, "mixed torch.Tensor and DTensor"),
        ):
            inputs, targets = batch(0)
            mse_loss(model(inputs), targets).backward()
            with self.assertRaisesRegex(RuntimeError, error):
                clip_grad_norm_(model.parameters(), 1e-3)

            model.zero_grad()
            mse_loss(model(inputs), targets).backward()
            matrices, others = partition_parameters(model)
            before = [p.grad.clone() for p in matrices]
            clip_grad_norm_(others, 1e-3)
            for p, grad in zip(matrices, before, strict=True):
                self.assertTrue(torch.equal(p.grad, grad))
            (bias,) = others
            grad = bias.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            # torch adds 1e-6 to the norm that divides.
            limit = torch.tensor(1e-3)
            self.assertEqual(grad.norm(), limit, atol=0, rtol=1e-3)

    def test_gradients_of_all_meshes(self):
        """Guide, clipping: the example's function has the norm of one process."""
        mesh, *_ = self.grid("fsdp", "tp")
        one, model = Transformer(), Transformer()
        plan = {
            "attention.qkv_proj": parallel.ColwiseParallel(output_layouts=Replicate())
        }
        for layer in model.layers:
            parallel.parallelize_module(layer, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["fsdp"])
        self.assertEqual(len({p.device_mesh for p in model.parameters()}), 2)

        inputs, targets = batch(0)
        for each in (one, model):
            mse_loss(each(inputs), targets).backward()
        clip_grad_norm_(one.parameters(), 1e-3)
        example("train_fsdp2").clip(model, 1e-3)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            self.assertEqual(q.grad.full_tensor(), p.grad, atol=1e-8, rtol=1e-4)
