"""The matrices of public models, which the tests list."""

from __future__ import annotations

import sys

from tools.overlay.repo import ROOT


# A test lands in PyTorch and cannot import tools, so the lists lie with the tests.
sys.path.append(str(ROOT / "test" / "distributed" / "optim"))

from muon_model_shapes import Model, MODELS, Shape


__all__ = ["MODELS", "Model", "Shape"]
