# Owner(s): ["module: optimizer"]
"""The imports within torch/optim/_muon_engine, read from the source: they go one way, types included."""

import ast
import importlib.util
from graphlib import TopologicalSorter
from pathlib import Path

import torch.optim
from torch.testing._internal.common_utils import run_tests, TestCase


FOLDER = Path(torch.optim.__file__).parent / "_muon_engine"
ENGINE = "torch.optim._muon_engine"
# The rules about models. They may read what the layouts know of parameters.
MODELS = "torch.optim._muon_models"
# The modules of the engine. Each may import those before it.
ORDER = [
    "config",
    "process_groups",
    "regions",
    "flights",
    "agreement",
    "local",
    "fsdp2",
    "fsdp1",
    "tp_dims",
    "joins",
    "dtensors",
    "groups",
    "fitting",
    "round_trip",
    "plan",
    "factory",
    "params",
    "statuses",
    "step",
    "functions",
    "engine",
]
# Names that only the readers may know, and what looks at single tensors.
OF_FRAMEWORKS = {"DTensor", "FlatParameter", "_fsdp_flattened", "device_mesh"}
READERS = {"local", "fsdp2", "fsdp1", "tp_dims", "dtensors", "groups"}
READERS |= {"fitting", "round_trip", "factory"}


def modules(root=ENGINE):
    """Module of the package ``root`` -> its syntax tree."""
    folder = FOLDER.with_name(root.rpartition(".")[2])
    return {path.stem: ast.parse(path.read_text()) for path in folder.glob("*.py")}


def imports_of(tree, package="torch.optim"):
    """The names that a file of ``package`` imports, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            base = importlib.util.resolve_name(base, package)
            # A name after "import" may be a module, too.
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
    return found


class TestMuonImports(TestCase):
    def test_imports_go_one_way(self):
        known = modules()
        self.assertEqual({*known}, {*ORDER, "__init__"})
        for number, name in enumerate(ORDER):
            imports = imports_of(known[name], ENGINE)
            above = ("torch.optim._muon.", "torch.optim.muon", MODELS)
            upwards = [each for each in imports if f"{each}.".startswith(above)]
            self.assertEqual(upwards, [], name)
            later = {f"{ENGINE}.{other}" for other in ORDER[number:]}
            self.assertEqual(imports & later, set(), name)

    def test_only_functions_of_muon_import_the_rules_about_models(self):
        for path in FOLDER.parent.glob("*muon*.py"):
            tree = ast.parse(path.read_text())
            importers = {
                getattr(node, "name", "")
                for node in tree.body
                if any(name.startswith(MODELS) for name in imports_of(node))
            }
            expected = set()
            if path.name == "muon.py":
                expected = {"partition_named_parameters", "split_of"}
            self.assertEqual(importers, expected, path.name)

    def test_rules_about_models_import_one_way(self):
        graph = {}
        allowed = (MODELS, "torch.optim._muon_split", f"{ENGINE}.fsdp")
        allowed += (f"{ENGINE}.process_groups",)
        for name, tree in modules(MODELS).items():
            imports = imports_of(tree, MODELS)
            ours = {found for found in imports if found.startswith("torch.optim")}
            ours -= {"torch.optim", ENGINE}
            self.assertEqual([i for i in ours if not i.startswith(allowed)], [], name)
            graph[f"{MODELS}.{name}"] = {i for i in imports if i.startswith(MODELS)}
        # Raises if there is a circle.
        TopologicalSorter(graph).prepare()

    def test_orthogonalization_stands_alone(self):
        """Its imports go one way. Muon's kernels are the only ones of Muon."""
        graph = {}
        for path in FOLDER.parent.glob("_newton_schulz*.py"):
            imports = imports_of(ast.parse(path.read_text()))
            graph[f"torch.optim.{path.stem}"] = imports
            of_muon = [name for name in imports if "muon" in name.lower()]
            allowed = "torch.optim._muon_kernels"
            self.assertEqual([n for n in of_muon if not n.startswith(allowed)], [])
        TopologicalSorter(graph).prepare()

    def test_torch_optim_loads_nothing_distributed(self):
        """Factories, and a Muon with a config, import what they need."""
        config = f"{ENGINE}.config"
        for name in ("_muon", "_newton_schulz", "muon", "_muon_engine/config"):
            with self.subTest(name=name):
                tree = ast.parse((FOLDER.parent / f"{name}.py").read_text())
                kinds = ast.Import, ast.ImportFrom
                loaded = [node for node in tree.body if isinstance(node, kinds)]
                for found in imports_of(ast.Module(loaded, [])):
                    if not found.startswith(config):
                        pattern = r"torch\.distributed|torch\.optim\._muon_engine\."
                        self.assertNotRegex(found, pattern)

    def test_only_readers_know_frameworks(self):
        for name, tree in modules().items():
            used = {
                getattr(node, key, "")
                for node in ast.walk(tree)
                for key in ("id", "attr", "name")
            }
            if name not in READERS:
                self.assertFalse(used & OF_FRAMEWORKS, name)


if __name__ == "__main__":
    run_tests()
