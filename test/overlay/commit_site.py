"""Lets a process import Muon from a commit's files only, as ``sitecustomize.py`` next to them.

Other modules come from the installed torch. It may have Muon's modules that are of later commits.
"""

import pathlib
import sys
from importlib.machinery import PathFinder


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        package, _, module = name.rpartition(".")
        if package not in ("torch.optim", "torch.testing._internal.distributed"):
            return None
        folder = pathlib.Path(__file__).resolve().parent
        place = folder.joinpath(*package.split(".")[1:])
        spec = PathFinder.find_spec(name, [str(place)])
        if spec is None and ("muon" in module or "newton_schulz" in module):
            raise ModuleNotFoundError(f"{name} is of a later commit", name=name)
        return spec


sys.meta_path.insert(0, Redirect)
