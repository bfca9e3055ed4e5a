# Owner(s): ["module: optimizer"]
"""The imports within torch/optim, read from the source: they go one way, types included."""

import ast
import importlib.util
from pathlib import Path

import torch.optim
from torch.testing._internal.common_utils import run_tests, TestCase


FOLDER = Path(torch.optim.__file__).parent
# The modules of the engine, and the rules about models. Each may import those before it.
ORDER = {
    "_muon_engine": [
        "config",
        "process_groups",
        "regions",
        "local",
        "params",
        "flights",
        "agreement",
        "fsdp2",
        "fsdp1",
        "tp_dims",
        "joins",
        "dtensors",
        "groups",
        "fitting",
        "inputs",
        "round_trip",
        "plan",
        "factory",
        "statuses",
        "step",
        "functions",
        "engine",
    ],
    "_muon_models": ["layers", "splits", "partition"],
}
# The rules about models may import these modules of the engine, which know parameters of layouts.
OF_LAYOUTS = {"fsdp1", "fsdp2", "process_groups"}
# Names that only the readers may know, and what looks at single tensors.
OF_FRAMEWORKS = {"DTensor", "FlatParameter", "_fsdp_flattened", "device_mesh"}
READERS = {"local", "fsdp2", "fsdp1", "tp_dims", "dtensors", "groups"}
READERS |= {"fitting", "round_trip", "factory"}


def tree_of(name):
    return ast.parse((FOLDER / f"{name}.py").read_text())


def imports_in(nodes, package=""):
    """The modules of torch that some nodes of a file import: those in torch.optim by their names in it."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, f"torch.optim{package}")
            # A name after "import" may be a module, too.
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
    return {name.removeprefix("torch.optim.") for name in found}


class TestMuonImports(TestCase):
    def test_imports_go_one_way(self):
        earlier = set()
        for package, names in ORDER.items():
            found = {path.stem for path in (FOLDER / package).glob("*.py")}
            self.assertEqual(found - {"__init__"}, {*names})
            for name in names:
                nodes = ast.walk(tree_of(f"{package}/{name}"))
                imports = imports_in(nodes, f".{package}")
                self.assertFalse(imports & {"_muon", "muon"}, name)
                inner = {
                    i
                    for i in imports
                    if i.startswith(("_muon_engine.", "_muon_models."))
                }
                modules = {".".join(i.split(".")[:2]) for i in inner}
                self.assertLessEqual(modules, earlier, name)
                earlier.add(f"{package}.{name}")
            earlier = {f"_muon_engine.{name}" for name in OF_LAYOUTS}

    def test_importing_torch_optim_loads_nothing_distributed(self):
        """Factories, and a Muon with a config, import what they need. Newton-Schulz needs no Muon."""
        above = "torch.distributed", "_muon_engine.", "_muon_models"
        for name in ("_muon", "_newton_schulz", "muon", "_muon_engine/config"):
            imports = imports_in(tree_of(name).body) - {"_muon_engine.config"}
            for found in imports:
                is_config = found.startswith("_muon_engine.config.")
                self.assertTrue(is_config or not found.startswith(above), name)
        for found in imports_in(ast.walk(tree_of("_newton_schulz"))):
            self.assertNotIn("muon", found)

    def test_only_readers_know_frameworks(self):
        for name in {*ORDER["_muon_engine"]} - READERS:
            for node in ast.walk(tree_of(f"_muon_engine/{name}")):
                for key in ("id", "attr", "name"):
                    used = getattr(node, key, "")
                    self.assertNotIn(used, OF_FRAMEWORKS, name)


if __name__ == "__main__":
    run_tests()
