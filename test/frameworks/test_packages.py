"""docs/migrating.md: its rows against the packages, where they are installed.

`setup_overlay.py test --frameworks` installs muon-optimizer. dion is on no index; into that environment:
`pip install git+https://github.com/microsoft/dion`.
"""

import math

import pytest
from overlay.test_migrating import page, SHAPES, trained


torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

TALL, WIDE, SQUARE = SHAPES
FILTERS = [(32, 4, 3, 3), (8, 16, 3, 3), (64, 2, 3, 3)]
STACKS = [(6, 64, 32), (6, 32, 64)]
# Both sides round to bfloat16 in each product, in different orders. The polynomials differ by 0.059.
CLOSE = 0.045


@pytest.fixture
def jordan():
    package = pytest.importorskip("muon")
    if not hasattr(package, "SingleDeviceMuon"):
        pytest.skip("this is another package of that name")
    return package


@pytest.fixture
def dion():
    package = pytest.importorskip("dion")
    torch.compiler.set_stance("force_eager")  # without a compiler
    yield package.Muon
    torch.compiler.set_stance("default")


def assert_same_steps(theirs, ours, shape):
    theirs = trained(lambda param: theirs([param]).step, shape)
    ours = trained(lambda param: ours([param]).step, shape)
    assert (theirs - ours).norm() < CLOSE * theirs.norm()


@pytest.mark.parametrize("decay", [0, 1])
@pytest.mark.parametrize("shape", [*SHAPES, *STACKS])
def test_keller_jordan(jordan, shape, decay):
    stacks = {"allow_batched_matrices": len(shape) > 2}
    assert_same_steps(
        lambda params: jordan.SingleDeviceMuon(params, weight_decay=decay),
        lambda params: page()["like_keller_jordan"](
            params, weight_decay=decay, **stacks
        ),
        shape,
    )


@pytest.mark.parametrize("decay", [0, 1])
@pytest.mark.parametrize("shape", FILTERS)
def test_keller_jordans_filters(jordan, shape, decay):
    """0.1.0 returns the update in another shape than the parameter's. Later commits reshape it."""
    whole = jordan.muon_update
    jordan.muon_update = lambda grad, *args, **kwargs: whole(
        grad, *args, **kwargs
    ).view_as(grad)
    scale = math.sqrt(max(1, shape[0] / math.prod(shape[1:])))

    def ours(params):
        groups = [{"params": params, "flatten": True}]
        return page()["like_keller_jordan"](groups, None, 0.02 / scale, decay * scale)

    try:
        assert_same_steps(
            lambda params: jordan.SingleDeviceMuon(params, weight_decay=decay),
            ours,
            shape,
        )
    finally:
        jordan.muon_update = whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"weight_decay": 1.0}, {"weight_decay": 1.0}),
        ({"use_polar_express": False}, {"ns_coefficients": "FIVE_TRIPLES"}),
        ({"adjust_lr": "rms_norm"}, {"adjust_lr_fn": "match_rms_adamw"}),
        ({"nesterov": True, "mu": 0.9}, {"nesterov": True, "momentum": 0.9}),
    ],
)
def test_dion(dion, shape, theirs, ours):
    names = page()
    ours = {
        key: names.get(value, value) if isinstance(value, str) else value
        for key, value in ours.items()
    }
    assert_same_steps(
        lambda params: dion(params, **theirs),
        lambda params: names["like_dion"](params, **ours),
        shape,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_dion_without_a_scale(dion, shape):
    scale = math.sqrt(max(1, shape[0] / shape[1]))
    ours = {"lr": 0.01 / scale, "weight_decay": scale, "adjust_lr_fn": "original"}
    assert_same_steps(
        lambda params: dion(params, adjust_lr=None, weight_decay=1.0),
        lambda params: page()["like_dion"](params, **ours),
        shape,
    )


@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize(
    ("shape", "theirs", "ours", "stacks"),
    [
        ((96, 32), {"split_sizes": (64, 16, 16)}, {"split": (64, 16, 16)}, False),
        ((96, 32), {"num_heads": 4}, {"split": [24] * 4}, False),
        ((32, 4, 3, 3), {"flatten": True}, {"flatten": True}, False),
        ((6, 64, 32), {}, {}, True),
        ((2, 3, 32, 64), {}, {}, True),
    ],
)
def test_dion_in_parts(dion, shape, theirs, ours, stacks, scale):
    options = {"allow_batched_matrices": stacks}
    if scale == "rms":
        theirs = {**theirs, "adjust_lr": "rms_norm"}
        ours = {**ours, "adjust_lr_fn": "match_rms_adamw"}
    assert_same_steps(
        lambda params: dion([{"params": params, **theirs}]),
        lambda params: page()["like_dion"]([{"params": params, **ours}], **options),
        shape,
    )


def test_dions_checkpoint(dion, tmp_path, monkeypatch):
    """Ten steps of dion, and ten here from its checkpoint: as twenty of dion."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    monkeypatch.chdir(tmp_path)
    names = page()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2)))
    grads = torch.randn(20, 2, 32, 32)
    matrices = [layer.weight for layer in model]
    biases = {"params": [layer.bias for layer in model], "algorithm": "adamw"}
    optimizer = dion([{"params": matrices}, biases])

    def train(optimizer, steps):
        for step in steps:
            for layer, grad in zip(model, grads[step]):
                layer.weight.grad, layer.bias.grad = grad.clone(), torch.zeros(32)
            optimizer.step()

    train(optimizer, range(10))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id="saved")
    middle = [matrix.detach().clone() for matrix in matrices]
    train(optimizer, range(10, 20))
    expected = [matrix.detach() - start for matrix, start in zip(matrices, middle)]
    for matrix, start in zip(matrices, middle):
        matrix.data.copy_(start)
    buffers = names["dion_buffers"]("saved")
    assert sorted(buffers) == ["0.weight", "1.weight"]
    muon = names["like_dion"](matrices)
    names["take_momentum"](muon, model, buffers, factor=1 - 0.95)
    train(muon, range(10, 20))
    for matrix, start, moved in zip(matrices, middle, expected):
        assert (matrix.detach() - start - moved).norm() < CLOSE * moved.norm()
