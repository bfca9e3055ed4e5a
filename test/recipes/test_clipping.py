"""A recipe for clipping where gradients are on several meshes."""

import sys
from pathlib import Path
from unittest import mock

from recipes.common import batch, parallelize, Recipe, Transformer
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_


EXAMPLES = Path(__file__).parents[2] / "examples"


class TestClipping(Recipe):
    def test_gradients_of_all_meshes(self):
        """Guide, clipping: torch's function fails. The example's function has the norm of one process."""
        mesh, *_ = self.grid("fsdp", "tp")
        one, model = Transformer(), Transformer()
        parallelize(model, mesh["tp"], ["attention.qkv_proj"])
        fully_shard(model, mesh=mesh["fsdp"])

        inputs, targets = batch(0)
        for each in (one, model):
            mse_loss(each(inputs), targets).backward()
        clip_grad_norm_(one.parameters(), 1e-3)
        with self.assertRaisesRegex(RuntimeError, "must have the same mesh"):
            clip_grad_norm_(model.parameters(), 1e-3)
        with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
            from train_fsdp2 import clip
        clip(model, 1e-3)
        for p, q in zip(one.parameters(), model.parameters(), strict=True):
            self.assertEqual(q.grad.full_tensor(), p.grad, atol=1e-8, rtol=1e-4)
