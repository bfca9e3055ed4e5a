"""docs/migrating.md: each Muon that a page's function builds takes the steps of the optimizer that it names."""

import math

import pytest
import torch
from overlay.test_docs import program_of
from tools.overlay.payload import ROOT
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    exact_result,
)


SHAPES = [(96, 32), (32, 96), (48, 48)]
POLAR_EXPRESS = [
    (8.156555, -22.483293, 15.878770),
    (4.042930, -2.808917, 0.500018),
    (3.891668, -2.772484, 0.506065),
    (3.285754, -2.368129, 0.464490),
    (2.346541, -1.709783, 0.423236),
]
# Newton-Schulz in bfloat16 is this far from the exact polynomial, for Gaussian gradients.
CLOSE = 0.04


def page():
    names = {}
    exec(program_of(ROOT / "docs/migrating.md").code, names)
    return names


def trained(make, shape, steps=4):
    """How far a parameter moves in some steps with Gaussian gradients."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(0.1 * torch.randn(shape))
    start = param.detach().clone()
    step = make(param)
    for _ in range(steps):
        param.grad = torch.randn(shape)
        step()
    return param.detach() - start


def published(param, lr, decay, scale, nesterov=True, summed=False, mu=0.95):
    """The step of a published formula in float64, with the defaults of its optimizer."""
    triples = [COEFFICIENTS] * 5 if nesterov else page()["FIVE_TRIPLES"]
    safety = 1
    if summed:  # dion
        triples, safety = POLAR_EXPRESS, 1.02
    weight = 1 if summed else 1 - mu
    momentum = torch.zeros_like(param, dtype=torch.float64)

    def step():
        grad = param.grad.double()
        momentum.mul_(mu).add_(weight * grad)
        ahead = mu * momentum + weight * grad
        update = exact_result(ahead if nesterov else momentum, triples, safety)
        with torch.no_grad():
            param.mul_(1 - lr * decay)
            param.sub_(lr * scale(*param.shape) * update)

    return step


def original(rows, columns):
    return math.sqrt(max(1, rows / columns))


# lr, weight decay and scale; dion and Megatron have no nesterov, and five triples.
PUBLISHED = {
    "like_stock": (1e-3, 0.1, original),
    "like_keller_jordan": (0.02, 0, original),
    "like_dion": (0.01, 0.01, lambda m, n: math.sqrt(m / n), False, True),
    "like_megatron": (3e-4, 0.01, lambda *sides: math.sqrt(max(sides)), False),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formulas(name, shape):
    theirs = trained(lambda param: published(param, *PUBLISHED[name]), shape)
    ours = trained(lambda param: page()[name]([param]).step, shape)
    assert (theirs - ours).norm() < CLOSE * theirs.norm()


def test_take_momentum():
    """Into a DTensor and into a plain parameter; a parameter without a buffer keeps none."""
    names, dist = page(), torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
        dist.fsdp.fully_shard(model[0])
        weights = [layer.weight for layer in model]
        muon = names["Muon"](weights, distributed_config="auto")
        buffers = {"0.weight": torch.eye(3), "1.weight": torch.ones(3, 3)}
        names["take_momentum"](muon, model, buffers, factor=0.5)
        found = [muon.state[weight].get("momentum_buffer") for weight in weights]
        assert found[0].placements == model[0].weight.placements
        assert torch.equal(found[0].full_tensor(), torch.eye(3) / 2)
        assert torch.equal(found[1], torch.ones(3, 3) / 2)
        assert found[2] is None
    finally:
        dist.destroy_process_group()
