# Owner(s): ["module: optimizer"]
"""torch.optim.Muon on one process: its steps, what it refuses and keeps, and its public names.

Where the overlay kept the torch.optim.Muon that it replaced, both run side by side and have to agree
bit by bit.
"""

import copy
import inspect
import itertools
import pickle
import sys
import unittest
from unittest import mock

import torch
from torch import nn
from torch.optim import _muon as ours, Muon, muon as public_module
from torch.optim.muon import create_auto_config, create_dtensor_config
from torch.testing._internal import common_optimizers
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    FUNCTIONAL,
    is_near,
    MuonTestCase,
)
from torch.testing._internal.distributed._muon.common_stock import needs_stock, stock


def change_options(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] += 0.1
        group["nesterov"] = not group["nesterov"]
        group["ns_steps"] -= 1


GROUPS = [
    {"params": [0, 2], "lr": 0.1, "weight_decay": 0.0, "nesterov": False},
    {"params": [1, 4, 5, 6, 7], "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"},
    {"params": [3], "momentum": 0.5, "eps": 1e-2},
]
# The options of trainings that end with the same bits.
PARITY = {
    "defaults": {},
    "no nesterov": {"lr": 0.05, "momentum": 0.5, "nesterov": False},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "spectral_unclamped": {"adjust_lr_fn": "spectral_unclamped"},
    "tensor lr": {"lr": torch.tensor(0.02)},
    "bfloat16 lr": {"lr": torch.tensor([0.02], dtype=torch.bfloat16)},
    "nothing moves": {"lr": 0.0, "weight_decay": 0.0},
    "no iteration": {"ns_steps": 0},
    "many iterations": {"ns_steps": 12, "ns_coefficients": (2.0, -1.5, 0.5)},
    # Larger than the norm, so that it is the divisor.
    "eps": {"eps": 1e4},
    "strided": {"strided": ("transposed", "every other column")},
    "strided otherwise": {"strided": ("every other column",) * 2, "nesterov": False},
    "missing gradients": {"steps": 6, "has_grad": lambda step, i: i and (step + i) % 3},
    "groups that change": {"groups": GROUPS, "lr": 0.02, "between": change_options},
}
SHAPES = [(8, 8), (16, 48), (48, 16), (1, 7), (7, 1), (1, 1), (33, 31), (64, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@needs_stock
@instantiate_parametrized_tests
class TestStockParity(MuonTestCase):
    def setUp(self):
        super().setUp()
        # Stock up to 2.14 normalizes a bfloat16 momentum buffer in place; here it is given a clone.
        original = stock()._zeropower_via_newtonschulz
        spared = mock.patch.object(
            stock(),
            "_zeropower_via_newtonschulz",
            lambda grad, *args: original(grad.clone(), *args),
        )
        spared.start()
        self.addCleanup(spared.stop)

    @parametrize("case", list(PARITY))
    def test_same_bits(self, case):
        options = PARITY[case]
        try:
            stock().Muon([torch.zeros(1, 1)], adjust_lr_fn=options.get("adjust_lr_fn"))
        except ValueError:
            self.skipTest(f"stock {torch.__version__} does not know {case}")
        for dtype in DTYPES:
            with self.subTest(dtype=dtype):
                self.assert_same_training(SHAPES, stock().Muon, dtype=dtype, **options)

    def test_inputs_of_upstreams_tests(self):
        for given in common_optimizers.optim_inputs_func_muon("cpu"):
            with self.subTest(given.desc):
                self.assert_same_training(SHAPES, stock().Muon, **given.kwargs)

    def test_arguments_begin_as_stocks(self):
        for name in ("Muon", "muon"):
            mine, theirs = (
                [
                    (each.name, each.default, each.kind)
                    for each in inspect.signature(
                        getattr(module, name)
                    ).parameters.values()
                ]
                for module in (ours, stock())
            )
            self.assertEqual(mine[: len(theirs)], theirs)

    def test_checkpoints_go_both_ways(self):
        for first, second in [(Muon, stock().Muon), (stock().Muon, Muon)]:
            with self.subTest(first=first, second=second):
                params, buffers, optimizer = self.run_steps(first, SHAPES[:3], lr=0.07)
                fresh = copy.deepcopy(params)
                restored = second(fresh)
                saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
                restored.load_state_dict(saved)
                self.assert_same_bits(self.buffers_of(restored, fresh), buffers)
                for param in params + fresh:
                    param.grad = torch.ones_like(param)
                optimizer.step()
                restored.step()
                self.assert_same_bits(fresh, params)


@unittest.skipUnless(torch.cuda.is_available(), "there is no GPU")
class TestMuonOnGPU(MuonTestCase):
    device = "cuda"

    def test_as_stock_and_as_on_the_cpu(self):
        if stock() is not None:
            for dtype in (torch.float32, torch.bfloat16):
                with self.subTest(dtype=dtype):
                    self.assert_same_training(
                        SHAPES, stock().Muon, dtype=dtype, lr=0.05
                    )
        with mock.patch.object(self, "device", "cpu"):
            starts, _, _ = self.run_steps(Muon, SHAPES, steps=0)
            others, their_buffers, _ = self.run_steps(Muon, SHAPES, lr=0.05)
        for foreach in (None, False, True):
            with self.subTest(foreach=foreach):
                params, buffers, _ = self.run_steps(
                    Muon, SHAPES, lr=0.05, foreach=foreach
                )
                torch.testing.assert_close(
                    [buffer.cpu() for buffer in buffers], their_buffers
                )
                for mine, other, start in zip(params, others, starts):
                    self.assertTrue(is_near(mine.cpu(), other, other - start))


class TestCompile(MuonTestCase):
    def trained(self, cls, is_compiled):
        _, _, optimizer = self.run_steps(
            cls, SHAPES[:3], steps=1, lr=torch.tensor(0.01)
        )
        step = optimizer.step
        if is_compiled:
            torch._dynamo.reset()
            self.addCleanup(torch._dynamo.reset)
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            step()
        return optimizer.param_groups[0]["params"]

    def test_step_is_one_graph(self):
        compiled = self.trained(Muon, True)
        self.assertEqual(compiled, self.trained(Muon, False), atol=2e-3, rtol=0)
        if stock() is not None:
            self.assert_same_bits(compiled, self.trained(stock().Muon, True))


@instantiate_parametrized_tests
class TestMuonCore(MuonTestCase):
    def test_backward_compatibility(self):
        model = nn.Linear(6, 8, bias=False)
        before = model.weight.detach().clone()
        optimizer = Muon(model.parameters(), lr=0.01, distributed_config=None)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        self.assertNotEqual(model.weight, before)
        self.assertEqual(optimizer.assignments, {})
        self.assertEqual(optimizer.current_rank, 0)

    @parametrize("shape", [(64, 64), (96, 32), (1, 20)])
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_orthogonalization_correctness(self, shape, dtype):
        rank = min(shape)
        left, right = (torch.linalg.qr(torch.randn(side, rank))[0] for side in shape)
        # The quintic starts at the Frobenius norm, so a spread that large is what it can take.
        spectrum = torch.linspace(1.0, 10.0, rank)
        matrix = ((left * spectrum) @ right.T).to(dtype)
        result = ours._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        self.assertEqual(result.dtype, torch.bfloat16)
        self.assertEqual(result.shape, shape)
        # The singular vectors are kept: in their basis the result is diagonal.
        core = left.T @ result.float() @ right
        values = core.diag()
        self.assertEqual(core, values.diag(), atol=0.06, rtol=0)
        self.assertTrue(0.25 < values.min() and values.max() < 1.25)

    def test_scale_that_older_versions_lack(self):
        name = "spectral_unclamped"
        found = [ours._adjust_lr(1.0, name, shape) for shape in ((8, 2), (2, 8))]
        self.assertEqual(found, [2.0, 0.5])

    def test_optimizers_pickled_before_there_was_a_config(self):
        (param,), _, optimizer = self.run_steps(Muon, [(2, 3)])
        old = copy.deepcopy(optimizer.__getstate__())
        old = {key: old[key] for key in ("defaults", "state", "param_groups")}
        for group in (old["defaults"], *old["param_groups"]):
            for new in ("foreach", "fused", "ns_algorithm", "split", "flatten"):
                del group[new]
        restored = Muon.__new__(Muon)
        restored.__setstate__(old)
        restored.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        (copied,) = restored.param_groups[0]["params"]
        copied.grad = param.grad
        restored.step()
        optimizer.step()
        self.assert_same_bits([copied], [param])

    def test_other_name_of_the_quintic(self):
        """Upstream's proposal calls it "standard". Ranks and checkpoints have one name."""
        other = {"ns_algorithm": "standard"}
        param = nn.Parameter(torch.ones(2, 3))
        built, loaded, written = Muon([param], **other), Muon([param]), Muon([param])
        saved = built.state_dict()
        saved["param_groups"][0].update(other)
        loaded.load_state_dict(saved)
        # A user may write into a group, and pickle the optimizer.
        written.param_groups[0].update(other)
        for optimizer in built, loaded, pickle.loads(pickle.dumps(written)):
            for group in (optimizer.defaults, *optimizer.param_groups):
                self.assertEqual(group["ns_algorithm"], "quintic")


CONFIGS = [None, create_dtensor_config(), create_auto_config()]
# Values that Muon refuses. YAML reads "1e-7" as text, for example.
WRONG = [
    ("lr", -1e-3, "Learning rate should be >= 0 but is: -0.001"),
    ("lr", torch.tensor(-1.0), "Learning rate should be >= 0"),
    ("lr", torch.tensor([0.1, 0.2]), "Tensor lr must be 1-element"),
    ("lr", "1e-3", "^lr must be a number"),
    ("momentum", -0.1, "momentum should be >= 0 but is: -0.1"),
    ("momentum", None, "^momentum must be a number"),
    ("weight_decay", -1, "weight decay should be >= 0 but is: -1"),
    ("weight_decay", None, "^weight_decay must be a number"),
    ("eps", -1e-7, "eps should be >= 0"),
    ("eps", "1e-7", "^eps must be a number"),
    ("fused", True, "fused=True and foreach=True exclude each other"),
    ("adjust_lr_fn", "match_rms_adam", "function match_rms_adam is not supported"),
    ("ns_algorithm", "g", "ns_algorithm .*'quintic', 'gram'.*'g'"),
    ("ns_steps", 100, "Number of steps must be less than 100"),
    ("ns_steps", 5.0, "^ns_steps must be an int"),
    ("ns_coefficients", (1.0, 2.0), "exactly 3 values"),
    ("ns_coefficients", [(1, 2)] * 5, "exactly 3 values"),
    ("ns_coefficients", [(1, 2, 3)] * 4, "4 tuples but ns_steps is 5"),
]


class TestMuonRefusals(MuonTestCase):
    def test_options(self):
        """They failed in the middle of a step, and some ranges only at construction."""
        kinds = TypeError, ValueError
        for (name, value, words), config in itertools.product(WRONG, CONFIGS):
            with self.subTest(name=name, value=value, config=config):
                param = nn.Parameter(torch.randn(2, 3))
                options = {"foreach": True, "distributed_config": config}
                with self.assertRaisesRegex(kinds, words):
                    Muon([param], **{**options, name: value})
                # A step without a config checks no more than stock's.
                if config is None and "Number of steps" not in words:
                    continue
                muon = Muon([param], **options)
                param.grad = torch.randn(2, 3)
                muon.step()
                (group,) = muon.param_groups
                before = copy.deepcopy([param, *self.buffers_of(muon, [param])])
                right, group[name] = group[name], value
                with self.assertRaisesRegex(kinds, words):
                    muon.step()
                now = [param, *self.buffers_of(muon, [param])]
                self.assert_same_bits(now, before)
                group[name] = right
                muon.step()
                self.assertNotEqual(param, before[0])

    def test_error_inputs_of_upstreams_tests(self):
        inputs = common_optimizers.optim_error_inputs_func_muon("cpu", torch.float32)
        self.assertGreaterEqual(len(inputs), 7)
        for error_input in inputs:
            given = error_input.optimizer_error_input
            kind, words = error_input.error_type, error_input.error_regex
            raised = self.assertRaisesRegex
            if issubclass(kind, Warning):
                raised = self.assertWarnsRegex
            # In the constructor or in a step.
            with self.subTest(given.desc), raised(kind, words):
                Muon(given.params, **given.kwargs).step()

    def test_parameters_that_are_no_matrices(self):
        with self.assertRaisesRegex(ValueError, "empty parameter list"):
            Muon([])
        for shape, modules, end in (
            ((), {}, "AdamW$"),
            ((3,), {}, "AdamW$"),
            # Only it is blamed for flat partitions.
            ((3,), {"deepspeed": mock.Mock()}, r"AdamW\. DeepSpeed's ZeRO .*FSDP2$"),
            ((2, 3, 4), {}, "as a stack of matrices$"),
        ):
            for config in CONFIGS:
                with self.subTest(shape=shape, modules=modules, config=config):
                    params = [torch.randn(2, 2), torch.randn(shape)]
                    # Process groups may cut what FSDP1 flattened.
                    words = rf"only supports 2D parameters.*({end}|of shape \(3,\)$)"
                    with (
                        mock.patch.dict(sys.modules, modules),
                        self.assertRaisesRegex(ValueError, words),
                    ):
                        Muon(params, distributed_config=config)

    def test_gradients(self):
        for config in CONFIGS:
            with self.subTest(config=config):
                param, sparse = (
                    nn.Parameter(torch.rand(2, 3, dtype=dtype))
                    for dtype in (torch.complex64, torch.float32)
                )
                param.grad = torch.rand_like(param)
                sparse.grad = torch.rand(2, 3).to_sparse()
                for given, words in (param, "complex parameters"), (sparse, "sparse"):
                    muon = Muon([given], distributed_config=config)
                    with self.assertRaisesRegex(RuntimeError, words):
                        muon.step()
                sparse.grad = None
                muon.step()

    def test_functional_form(self):
        stack, matrix, row = torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.ones(3)
        for tensors, options, words in (
            ([stack] * 3, {}, "must be a 2D matrix"),
            ([stack] * 3, {"distributed_config": CONFIGS[1]}, "must be a 2D matrix"),
            # It would be added to each row of the momentum.
            ([matrix, row, matrix], {}, "must be a 2D matrix"),
            ([matrix] * 3, {"has_complex": True}, "Complex .* not supported"),
        ):
            with self.subTest(options=options):
                with self.assertRaisesRegex(ValueError, words):
                    ours.muon(
                        *([each] for each in tensors), **{**FUNCTIONAL, **options}
                    )

    def test_state_dicts_of_others(self):
        """They loaded, and the next step failed."""
        for cls, shape, config, words in (
            (Muon, (6, 4), None, r"'?up'? of shape \(4, 6\).*\(6, 4\)"),
            (torch.optim.AdamW, (4, 6), None, "not of Muon.*lacks.*'ns_steps'"),
            (torch.optim.SGD, (4, 6), "auto", "not of Muon.*lacks.*'ns_steps'"),
        ):
            with self.subTest(cls=cls):
                _, _, other = self.run_steps(cls, [shape], lr=0.5)
                param = nn.Parameter(torch.randn(4, 6))
                muon = Muon([("up", param)], lr=0.1, distributed_config=config)
                with self.assertRaisesRegex(ValueError, words):
                    muon.load_state_dict(other.state_dict())
                self.assertEqual(muon.param_groups[0]["lr"], 0.1)
                self.assertFalse(muon.state)
                param.grad = torch.randn(4, 6)
                muon.step()


class TestReports(TestCase):
    def test_describe_without_a_config(self):
        shapes = {"qkv": (8, 16), "head": (4, 8), "gain": (8,)}
        model = nn.ParameterDict({name: torch.ones(shapes[name]) for name in shapes})
        muon = Muon([model["qkv"]])
        words = "Muon has 1 parameter\nNo optimizer given here has head\n.*has no"
        self.assertRegex(muon.describe(model), words)
        # A vector is no matrix.
        page = muon.describe(model, torch.optim.AdamW([model["head"]]))
        self.assertNotIn("No optimizer", page)
        copied = copy.deepcopy(Muon(muon.param_groups, distributed_config="auto"))
        self.assertIn("lost its distributed_config", copied.describe())

    def test_public_names(self):
        # As upstream's test of public bindings: __all__ must list each public name of this module.
        presets = {"CUBIC", "DEEPSEEK_V4", "POLAR_EXPRESS"}
        public = set()
        for name, value in vars(public_module).items():
            is_own = getattr(value, "__module__", None) == "torch.optim.muon"
            if is_own and not name.startswith("_"):
                self.assertTrue(value.__doc__)
                public.add(name)
        self.assertEqual(public | presets, set(public_module.__all__))
        self.assertIs(public_module.Muon, torch.optim.Muon)
        self.assertEqual(Muon.__module__, "torch.optim")


if __name__ == "__main__":
    run_tests()
