"""A program that is written for Muon of a supported release runs with the same words here."""

import ast
import inspect

import pytest
from overlay.conftest import MUON
from tools.overlay import versions


OPTIONS = "lr weight_decay momentum nesterov ns_coefficients ns_steps eps adjust_lr_fn"
FIRST = {
    "Muon": {"params", *OPTIONS.split()},
    "muon": {"foreach", "has_complex", *OPTIONS.split()},
}
# The arguments that a user of each release may give by name: to Muon, and to the functional
# form, whose lists come first. A release that adds one gets a table of its own.
RELEASES = {"2.11": FIRST, "2.12, 2.13": FIRST, "2.14": FIRST, "2.15": FIRST}


def arguments_of(text, name):
    """The arguments that a user of that class or function may give by name."""
    nodes = ast.parse(text).body
    (node,) = (node for node in nodes if getattr(node, "name", None) == name)
    if isinstance(node, ast.FunctionDef):
        return {argument.arg for argument in node.args.kwonlyargs}
    (init,) = (
        method for method in node.body if getattr(method, "name", "") == "__init__"
    )
    arguments = [*init.args.args, *init.args.kwonlyargs]
    return {argument.arg for argument in arguments} - {"self"}


def test_each_supported_release_is_compared():
    assert {*versions.STOCK[MUON].values()} == {*RELEASES}


@pytest.mark.parametrize("name", ["Muon", "muon"])
def test_arguments_of_the_installed_release(stock_muon, name):
    release = versions.stock(MUON, stock_muon)
    assert arguments_of(stock_muon, name) == RELEASES[release][name]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["Muon", "muon"])
def test_arguments_of_every_release_are_taken(release, name):
    """Also, nothing more is required."""
    ours = pytest.importorskip("torch.optim._muon")
    theirs = RELEASES[release][name]
    arguments = inspect.signature(getattr(ours, name)).parameters
    by_name = set()
    required = set()
    for argument in arguments.values():
        if argument.kind in (argument.KEYWORD_ONLY, argument.POSITIONAL_OR_KEYWORD):
            by_name.add(argument.name)
            if argument.default is argument.empty:
                required.add(argument.name)
    lists = {"params", "grads", "muon_momentum_bufs"}
    assert by_name >= theirs
    assert required <= theirs | lists
