"""docs/migrating.md: its rows against Keller Jordan's package, where it is installed.

`setup_overlay.py test --frameworks` installs muon-optimizer.
"""

import math

import pytest
from overlay.test_migrating import page, SHAPES, trained


torch = pytest.importorskip("torch")

FILTERS = [(8, 16, 3, 3), (64, 2, 3, 3)]
STACKS = [(6, 64, 32), (6, 32, 64), (2, 3, 32, 64)]
# Both sides round to bfloat16 in each product, in different orders. The polynomials differ by 0.059.
CLOSE = 0.045


@pytest.fixture
def jordan():
    package = pytest.importorskip("muon")
    if not hasattr(package, "SingleDeviceMuon"):
        pytest.skip("this is another package of that name")
    return package


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

    expected = trained(lambda param: theirs([param]).step, shape)
    found = trained(lambda param: ours([param]).step, shape)
    assert (found - expected).norm() < CLOSE * expected.norm()


@pytest.mark.parametrize("given", [{}, {"lr": 1e-2}])
def test_keller_jordans_other_groups(jordan, given):
    def theirs(params):
        # It needs a group of each kind.
        matrix = torch.nn.Parameter(torch.zeros(4, 4))
        matrix.grad = torch.zeros(4, 4)
        groups = [{"params": params, "use_muon": False, **given}]
        groups += [{"params": [matrix], "use_muon": True}]
        return jordan.SingleDeviceMuonWithAuxAdam(groups)

    def ours(params):
        return page()["adamw_like_keller_jordan"](params, **given)

    found, expected = (
        trained(lambda param: make([param]).step, (16, 8)) for make in (ours, theirs)
    )
    # Both work in float32, and differ in the order of their operations only.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
