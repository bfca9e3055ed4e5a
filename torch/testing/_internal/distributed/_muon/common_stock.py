"""The torch.optim.Muon that the overlay replaced."""

import functools
import importlib.util
import sys
import unittest
from pathlib import Path

import torch


@functools.cache
def stock():
    """The torch.optim._muon that the overlay replaced; None if it was not kept."""
    place = Path(torch.__file__).parents[1] / "stock.txt"
    if not place.exists():
        return None
    kept = Path(place.read_text(), "torch/optim/_muon.py")
    # Of the package torch.optim, so that its relative imports find what they mean.
    name = "torch.optim._stock_muon"
    spec = importlib.util.spec_from_file_location(name, kept)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


needs_stock = unittest.skipIf(
    stock() is None,
    "the torch.optim.Muon that was replaced is not kept beside this torch",
)
