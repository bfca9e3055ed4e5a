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
STACKS = [(6, 64, 32), (6, 32, 64), (2, 3, 32, 64)]
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
@pytest.mark.parametrize("shape", [*SHAPES, *STACKS, *FILTERS])
def test_keller_jordan(jordan, monkeypatch, shape, decay):
    is_filter, scale, options = len(shape) > 3, 1.0, {}
    if is_filter:
        whole = jordan.muon_update

        def update(grad, *args, **kwargs):
            return whole(grad, *args, **kwargs).view_as(grad)

        # 0.1.0 returns the update in another shape than the parameter's. Later commits reshape it.
        monkeypatch.setattr(jordan, "muon_update", update)
        scale = math.sqrt(max(1, shape[0] / math.prod(shape[1:])))
    elif len(shape) > 2:
        options["allow_batched_matrices"] = True

    def ours(params):
        groups = [{"params": params, "flatten": is_filter}]
        like = page()["like_keller_jordan"]
        return like(groups, None, 0.02 / scale, decay * scale, **options)

    def theirs(params):
        return jordan.SingleDeviceMuon(params, weight_decay=decay)

    assert_same_steps(theirs, ours, shape)


# Biases, tables and matrices that are no hidden ones.
REST = [(48,), (16, 8)]


def assert_same_adamw(theirs, ours, shape):
    """Both work in float32, and differ in the order of their operations only."""
    found, expected = (
        trained(lambda param: make([param]).step, shape) for make in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shape", REST)
@pytest.mark.parametrize("given", [{}, {"lr": 1e-2}])
def test_keller_jordans_other_groups(jordan, shape, given):
    def theirs(params):
        # It needs a group of each kind.
        matrix = torch.nn.Parameter(torch.zeros(4, 4))
        matrix.grad = torch.zeros(4, 4)
        groups = [{"params": params, "use_muon": False, **given}]
        groups += [{"params": [matrix], "use_muon": True}]
        return jordan.SingleDeviceMuonWithAuxAdam(groups)

    def ours(params):
        return page()["adamw_like_keller_jordan"](params, **given)

    assert_same_adamw(theirs, ours, shape)


@pytest.mark.parametrize("shape", REST)
@pytest.mark.parametrize("given", [{}, {"lr": 1e-3, "weight_decay": 0.1}])
def test_dions_other_groups(dion, shape, given):
    def theirs(params):
        return dion([{"params": params, "algorithm": "adamw", **given}])

    def ours(params):
        return page()["adamw_like_dion"](params, **given)

    assert_same_adamw(theirs, ours, shape)


# Shapes, dion's options and ours.
DION = [
    (SHAPES, {}, {}),
    (SHAPES, {"weight_decay": 1.0}, {"weight_decay": 1.0}),
    (SHAPES[:1], {"weight_decay": torch.tensor(1.0)}, {"weight_decay": 1.0}),
    (SHAPES, {"use_polar_express": False}, {}),
    (SHAPES, {"adjust_lr": "rms_norm"}, {"adjust_lr_fn": "match_rms_adamw"}),
    (SHAPES, {"nesterov": True, "mu": 0.9}, {"nesterov": True, "momentum": 0.9}),
    (SHAPES, {"adjust_lr": None, "weight_decay": 1.0}, {"adjust_lr_fn": "original"}),
    ([TALL], {"split_sizes": (64, 16, 16)}, {"split": (64, 16, 16)}),
    ([TALL], {"num_heads": 4}, {"split": [24] * 4}),
    (FILTERS[:1], {"flatten": True}, {"flatten": True}),
    (STACKS, {}, {}),
]
BY_RMS = {"adjust_lr": "rms_norm"}, {"adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("more", [({}, {}), BY_RMS], ids=["spectral", "rms"])
@pytest.mark.parametrize(
    ("shape", "theirs", "ours"),
    [(shape, *options) for shapes, *options in DION for shape in shapes],
)
def test_dion(dion, shape, theirs, ours, more):
    theirs, ours = more[0] | theirs, more[1] | ours
    if "use_polar_express" in theirs:
        ours["ns_coefficients"] = page()["FIVE_TRIPLES"]
    if ours.get("adjust_lr_fn") == "original":
        scale = math.sqrt(max(1, shape[0] / shape[1]))
        ours |= {"lr": 0.01 / scale, "weight_decay": scale}
    ours["allow_batched_matrices"] = len(shape) > 2 and "flatten" not in ours

    def build(make, params, options):
        forms = {"split_sizes", "num_heads", "split", "flatten"} & options.keys()
        group = {"params": params} | {name: options[name] for name in forms}
        return make([group], **{k: v for k, v in options.items() if k not in forms})

    assert_same_steps(
        lambda params: build(dion, params, theirs),
        lambda params: build(page()["like_dion"], params, ours),
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
