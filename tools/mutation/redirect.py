"""Lets a process import Muon from this folder, which is on PYTHONPATH, as ``sitecustomize.py``."""

import pathlib
import sys
from importlib.machinery import PathFinder


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        # The package's own modules follow from its path. Torch has the others.
        optim = pathlib.Path(__file__).resolve().parent / "optim"
        is_ours = name.rpartition(".")[0] == "torch.optim"
        return PathFinder.find_spec(name, [str(optim)]) if is_ours else None


sys.meta_path.insert(0, Redirect)
