"""Lets a process import Muon from this folder, which is on PYTHONPATH, as ``sitecustomize.py``."""

import pathlib
import sys
from importlib.machinery import PathFinder


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        package, _, _ = name.rpartition(".")
        # The package's own modules follow from its path. Torch has the others.
        if package != "torch.optim":
            return None
        here = pathlib.Path(__file__).resolve()
        optim = here.parent / "optim"
        return PathFinder.find_spec(name, [str(optim)])


sys.meta_path.insert(0, Redirect)
