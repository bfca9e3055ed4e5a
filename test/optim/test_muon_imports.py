# Owner(s): ["module: optimizer"]
"""The imports within torch/optim/_muon_engine, read from the source: they go one way, types included."""

import ast
import importlib.util
from graphlib import TopologicalSorter
from pathlib import Path
from unittest import mock

import torch.optim
from torch.optim import _muon
from torch.testing._internal.common_utils import run_tests, TestCase


FOLDER = Path(torch.optim.__file__).parent / "_muon_engine"
ENGINE = "torch.optim._muon_engine"
# The rules about models. They may read what the layouts know of parameters.
MODELS = "torch.optim._muon_models"
# The parts of the engine. Each may import those before it, and those of its own row.
ROWS = [
    {"config"},
    {"process_groups"},
    {"agreement"},
    {"layouts"},
    {"schedule"},
    {"runtime"},
    {"config_functions", "factory", "functions", "group_config"},
    {"building", "changes"},
    {"engine"},
    {"functional"},
]
# Names that only the layouts may know.
OF_FRAMEWORKS = {"DTensor", "FlatParameter", "_fsdp_flattened", "placements"}


def row_of(module):
    part = module.removeprefix(ENGINE).lstrip(".").partition(".")[0]
    return next(index for index, row in enumerate(ROWS) if part in row)


def modules(root=ENGINE):
    """Module of the package ``root`` -> its syntax tree, and the package that relative imports start from."""
    found, root_folder = {}, FOLDER.with_name(root.rpartition(".")[2])
    for path in sorted(root_folder.rglob("*.py")):
        *folders, file = path.relative_to(root_folder).with_suffix("").parts
        package = ".".join([root, *folders])
        name = package if file == "__init__" else f"{package}.{file}"
        found[name] = ast.parse(path.read_text()), package
    return found


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
    def test_torch_that_was_installed_again_under_the_patch(self):
        """Its Muon knows no config, and said so with a bare TypeError."""
        spec = importlib.util.find_spec("torch.optim.muon")
        module = importlib.util.module_from_spec(spec)
        with mock.patch.object(_muon, "Muon", object):
            with self.assertRaisesRegex(ImportError, "apply it again"):
                spec.loader.exec_module(module)

    def test_imports_go_one_way(self):
        known, graph = modules(), {}
        del known[ENGINE]
        self.assertEqual({row_of(name) for name in known}, set(range(len(ROWS))))
        for name, (tree, package) in known.items():
            imports = imports_of(tree, package)
            above = ("torch.optim._muon.", "torch.optim.muon", MODELS)
            upwards = [each for each in imports if f"{each}.".startswith(above)]
            self.assertEqual(upwards, [], name)
            graph[name] = imports & known.keys() - {name}
            for other in graph[name]:
                self.assertLessEqual(row_of(other), row_of(name), f"{name}: {other}")
        # Raises if there is a circle.
        TopologicalSorter(graph).prepare()

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
        known, graph = modules(MODELS), {}
        (docstring,) = known[MODELS][0].body
        self.assertIsInstance(docstring.value, ast.Constant)
        allowed = (MODELS, "torch.optim._muon_split", f"{ENGINE}.layouts")
        allowed += (f"{ENGINE}.process_groups",)
        for name, (tree, package) in known.items():
            imports = imports_of(tree, package)
            ours = {found for found in imports if found.startswith("torch.optim")}
            ours -= {"torch.optim", ENGINE}
            self.assertEqual([i for i in ours if not i.startswith(allowed)], [], name)
            graph[name] = imports & known.keys() - {name}
        # Raises if there is a circle.
        TopologicalSorter(graph).prepare()

    def test_orthogonalization_stands_alone(self):
        tree = ast.parse((FOLDER.parent / "_newton_schulz.py").read_text())
        self.assertFalse([name for name in imports_of(tree) if "muon" in name])

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

    def test_only_layouts_know_frameworks(self):
        for name, (tree, _) in modules().items():
            used = {
                getattr(node, key, "")
                for node in ast.walk(tree)
                for key in ("id", "attr", "name")
            }
            if not name.startswith(f"{ENGINE}.layouts"):
                self.assertFalse(used & OF_FRAMEWORKS, name)


if __name__ == "__main__":
    run_tests()
