"""Recipes for clipping where gradients are on several meshes: torch's own function fails there."""

import sys
from pathlib import Path
from unittest import mock

import torch
from recipes.common import batch, FeedForward, parallelize, Recipe, Transformer, WIDTH
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim.muon import partition_parameters


EXAMPLES = Path(__file__).parents[2] / "examples"


class TestClipping(Recipe):
    def test_gradients_of_adamw_only(self):
        """Guide, clipping: gradients on two meshes cannot be clipped together. Those of AdamW can, and Muon's
        stay as they are."""
        experts, *_ = self.grid("ep", "fsdp")
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FeedForward())
        fully_shard(model[1], mesh=experts["fsdp"])
        fully_shard(model)
        inputs, targets = batch(0)
        mse_loss(model(inputs), targets).backward()
        with self.assertRaisesRegex(RuntimeError, "must have the same mesh"):
            clip_grad_norm_(model.parameters(), 1e-3)

        model.zero_grad()
        mse_loss(model(inputs), targets).backward()
        matrices, others = partition_parameters(model)
        before = [p.grad.clone() for p in matrices]
        clip_grad_norm_(others, 1e-3)
        for p, grad in zip(matrices, before, strict=True):
            self.assertTrue(torch.equal(p.grad, grad))
        (bias,) = others
        # torch adds 1e-6 to the norm that divides.
        limit = torch.tensor(1e-3)
        self.assertEqual(bias.grad.full_tensor().norm(), limit, atol=0, rtol=1e-3)

    def test_gradients_of_all_meshes(self):
        """Guide, clipping: the example's function has the norm of one process."""
        mesh, *_ = self.grid("fsdp", "tp")
        one, model = Transformer(), Transformer()
        parallelize(model, mesh["tp"], ["attention.qkv_proj"])
        fully_shard(model, mesh=mesh["fsdp"])
        self.assertEqual(len({p.device_mesh for p in model.parameters()}), 2)

        inputs, targets = batch(0)
        for each in (one, model):
            mse_loss(each(inputs), targets).backward()
        clip_grad_norm_(one.parameters(), 1e-3)
        with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
            from train_fsdp2 import clip
        clip(model, 1e-3)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            self.assertEqual(q.grad.full_tensor(), p.grad, atol=1e-8, rtol=1e-4)
