"""The optimizer of the recipes that holds several is one of them all."""

import copy
import importlib.util

import pytest
from tools.overlay.payload import ROOT


torch = pytest.importorskip("torch")
COMBINED = ROOT / "examples" / "frameworks" / "combined.py"


@pytest.fixture
def combined():
    spec = importlib.util.spec_from_file_location("combined", COMBINED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Combined


def make(combined):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    inner = torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    return model, combined(*inner), inner


def train(model, *optimizers):
    for inputs in torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_steps_are_those_of_the_parts(combined):
    model, optimizer, _ = make(combined)
    other, _, inner = make(combined)
    for found, expected in zip(train(model, optimizer), train(other, *inner)):
        assert torch.equal(found, expected)


def test_checkpoint_goes_to_the_parts(combined):
    model, optimizer, _ = make(combined)
    train(model, optimizer)
    weights, saved = model.state_dict(), copy.deepcopy(optimizer.state_dict())
    again, loaded, inner = make(combined)
    again.load_state_dict(weights)
    saved["param_groups"][0]["lr"] = 0.05
    loaded.load_state_dict(saved)
    assert [each.param_groups[0]["lr"] for each in inner] == [0.05, 0.1]
    optimizer.param_groups[0]["lr"] = 0.05
    expected = train(model, optimizer)
    for found, value in zip(train(again, loaded), expected):
        assert torch.equal(found, value)


def test_schedulers_and_exchanged_parameters_reach_the_parts(combined):
    model, optimizer, inner = make(combined)
    optimizer.load_state_dict(optimizer.state_dict())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [each.param_groups[0]["lr"] for each in inner] == [0.05, 0.05]
    other = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer.param_groups[0]["params"][0] = other
    assert inner[0].param_groups[0]["params"][0] is other
