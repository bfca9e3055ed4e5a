"""Lets this process import Muon from the folder that this file is in.

Copied there as ``sitecustomize.py``: with the folder on PYTHONPATH every interpreter runs it at its
start, those of the processes that tests spawn included.
"""

import importlib.abc
import importlib.util
import pathlib
import sys


OPTIM = pathlib.Path(__file__).resolve().parent / "optim"
# The package's own modules follow from its path.
PLACES = {
    "torch.optim._muon": OPTIM / "_muon.py",
    "torch.optim._newton_schulz": OPTIM / "_newton_schulz.py",
    "torch.optim.muon": OPTIM / "muon.py",
    "torch.optim._muon_partition": OPTIM / "_muon_partition.py",
    "torch.optim._muon_engine": OPTIM / "_muon_engine" / "__init__.py",
}


class Redirect(importlib.abc.MetaPathFinder):
    """Finds the modules of ``PLACES`` before torch's own folder is looked at."""

    def find_spec(self, fullname, path=None, target=None):
        place = PLACES.get(fullname)
        if place is None:
            return None
        return importlib.util.spec_from_file_location(fullname, place)


sys.meta_path.insert(0, Redirect())
