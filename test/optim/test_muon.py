# Owner(s): ["module: optimizer"]
"""torch.optim.Muon on one process, without a distributed_config.

Where the overlay kept the torch.optim.Muon that it replaced, both run side by side and have to agree
bit by bit.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import unittest
from unittest import mock

import torch
from torch import nn
from torch.optim import _muon as ours
from torch.optim import Muon
from torch.testing._internal import common_optimizers, common_utils
from torch.testing._internal.common_utils import parametrize, TestCase
from torch.testing._internal.distributed._muon import common_config
from torch.testing._internal.distributed._muon.common_config import (
    COEFFICIENTS,
    FUNCTIONAL,
    make_matrix,
    MuonTestCase,
)
from torch.testing._internal.distributed._muon.common_stock import needs_stock, stock


MODES = "original", "match_rms_adamw", "spectral_unclamped"


# The options of the trainings that are compared with stock's.
PARITY = {
    **{mode: {"adjust_lr_fn": mode} for mode in MODES},
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
}


def stock_supports(adjust_lr_fn):
    try:
        stock().Muon([torch.zeros(1, 1)], adjust_lr_fn=adjust_lr_fn)
    except ValueError:
        return False
    return True


def stock_that_spares_its_input():
    """Stock up to 2.14 normalizes a bfloat16 momentum buffer in place; here it is given a clone."""
    original = stock()._zeropower_via_newtonschulz
    return mock.patch.object(
        stock(),
        "_zeropower_via_newtonschulz",
        lambda grad, *args: original(grad.clone(), *args),
    )


# Options that the first release did not have.
NEW_FLAGS = {"foreach", "fused", "ns_algorithm", "split", "flatten"}


SHAPES = [(8, 8), (16, 48), (48, 16), (1, 7), (7, 1), (1, 1), (33, 31), (64, 5)]


FEW_SHAPES = [(8, 8), (5, 24), (24, 5), (1, 3)]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def plain_step(param, grad, momentum, options):
    """Muon's step by the formulas of the papers, one operation after the other."""
    momentum.lerp_(grad, 1 - 0.95)
    blended = grad.lerp(momentum, 0.95) if options["nesterov"] else momentum
    x = blended.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.T if is_tall else x
    rows, columns = param.shape
    scale = max(1, rows / columns) ** 0.5
    if options["adjust_lr_fn"] == "match_rms_adamw":
        scale = 0.2 * max(rows, columns) ** 0.5
    elif options["adjust_lr_fn"] == "spectral_unclamped":
        scale = (rows / columns) ** 0.5
    param.mul_(1 - 0.05 * 0.1).add_(x, alpha=-0.05 * scale)


@common_utils.instantiate_parametrized_tests
class TestPlainFormulas(TestCase):
    """No torch.optim.Muon that was replaced is needed for these."""

    @parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @parametrize("nesterov", [True, False])
    @parametrize("mode", MODES)
    def test_bits(self, dtype, nesterov, mode):
        options = {"nesterov": nesterov, "adjust_lr_fn": mode}
        generator = torch.Generator().manual_seed(3)
        for shape in SHAPES:
            expected = make_matrix(shape, dtype, generator)
            momentum = torch.zeros_like(expected)
            param = nn.Parameter(expected.clone())
            optimizer = Muon([param], lr=0.05, weight_decay=0.1, **options)
            for _ in range(3):
                param.grad = make_matrix(shape, dtype, generator)
                with torch.no_grad():
                    plain_step(expected, param.grad, momentum, options)
                optimizer.step()
                self.assertEqual(param.detach(), expected, rtol=0, atol=0)


@needs_stock
@common_utils.instantiate_parametrized_tests
class TestStockParity(MuonTestCase):
    @parametrize("dtype", DTYPES)
    @parametrize("nesterov", [True, False])
    def test_shapes_and_dtypes(self, dtype, nesterov):
        spared = contextlib.nullcontext() if nesterov else stock_that_spares_its_input()
        with spared:
            options = {"nesterov": nesterov, "lr": 0.05, "momentum": 0.5}
            self.assert_same_training(SHAPES, stock().Muon, dtype=dtype, **options)

    @parametrize("case", list(PARITY))
    def test_options(self, case):
        options = PARITY[case]
        mode = options.get("adjust_lr_fn")
        if not stock_supports(mode):
            self.skipTest(f"stock {torch.__version__} does not know {mode}")
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                given = {"dtype": dtype, **options}
                with stock_that_spares_its_input():
                    self.assert_same_training(FEW_SHAPES, stock().Muon, **given)

    def test_groups_whose_hyperparameters_change(self):
        def change(optimizer, step):
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] += 0.1
                group["nesterov"] = not group["nesterov"]
                group["ns_steps"] -= 1

        groups = [
            {"params": [0, 2], "lr": 0.1, "weight_decay": 0.0, "nesterov": False},
            {"params": [1], "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"},
            {"params": [3], "momentum": 0.5, "eps": 1e-2},
        ]
        options = {"groups": groups, "lr": 0.02, "between": change}
        self.assert_same_training(SHAPES[:4], stock().Muon, **options)

    def test_checkpoints_go_both_ways(self):
        for first, second in [(Muon, stock().Muon), (stock().Muon, Muon)]:
            with self.subTest(first=first, second=second):
                params, buffers, optimizer = self.run_steps(first, SHAPES[:3], lr=0.07)
                fresh = [nn.Parameter(p.detach().clone()) for p in params]
                restored = second(fresh)
                restored.load_state_dict(
                    pickle.loads(pickle.dumps(optimizer.state_dict()))
                )
                self.assert_same_bits(self.buffers_of(restored, fresh), buffers)
                self.assertEqual(restored.param_groups[0]["lr"], 0.07)
                for each in (optimizer, restored):
                    for param in each.param_groups[0]["params"]:
                        param.grad = torch.ones_like(param)
                    each.step()
                self.assert_same_bits(fresh, params)

    def test_signatures_begin_alike(self):
        options = {"distributed_config", "allow_batched_matrices", "options"}
        options |= {"more_options"}
        options |= NEW_FLAGS
        for name in ("Muon", "muon", "_zeropower_via_newtonschulz", "_adjust_lr"):
            with self.subTest(name=name):
                mine = self.parameters_of(getattr(ours, name))
                others = self.parameters_of(getattr(stock(), name))
                first, more = mine[: len(others)], mine[len(others) :]
                self.assertEqual(first, others)
                self.assertLessEqual({new for new, *_ in more}, options)

    def parameters_of(self, function):
        """The name, the default and the kind of each."""
        found = []
        for parameter in inspect.signature(function).parameters.values():
            found.append((parameter.name, parameter.default, parameter.kind))
        return found

    @parametrize("name", ["muon", "_single_tensor_muon"])
    def test_functional(self, name):
        def run(module):
            generator = torch.Generator().manual_seed(3)
            lists = [], [], []
            for matrices in lists:
                for shape in SHAPES:
                    matrices.append(make_matrix(shape, generator=generator))
            params, grads, buffers = lists
            for _ in range(3):
                getattr(module, name)(params, grads, buffers, **FUNCTIONAL)
            return params + buffers + grads

        self.assert_same_bits(run(ours), run(stock()))
        self.assertIsNone(getattr(ours, name)([], [], [], **FUNCTIONAL))


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
                for mine, other in zip(buffers, their_buffers):
                    torch.testing.assert_close(mine.cpu(), other)
                for mine, other, start in zip(params, others, starts):
                    self.assertTrue(
                        common_config.is_near(mine.cpu(), other, other - start)
                    )


class TestCompile(MuonTestCase):
    def trained(self, cls, compiled):
        shapes, lr = [(6, 9), (9, 6)], torch.tensor(0.01)
        _, _, optimizer = self.run_steps(cls, shapes, steps=1, lr=lr)
        step = optimizer.step
        if compiled:
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


@common_utils.instantiate_parametrized_tests
class TestMuonCore(MuonTestCase):
    def test_backward_compatibility(self):
        layers = nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False)
        model = nn.Sequential(*layers)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = Muon(model.parameters(), lr=0.01, distributed_config=None)
        model(torch.randn(4, 6)).sum().backward()
        optimizer.step()
        for old, new in zip(before, model.parameters()):
            self.assertNotEqual(old, new)
        self.assertEqual(optimizer.assignments, {})
        self.assertEqual(optimizer.current_rank, 0)

    @parametrize("shape", [(64, 64), (32, 96), (96, 32), (1, 20)])
    @parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_orthogonalization_correctness(self, shape, dtype):
        generator = torch.Generator().manual_seed(sum(shape))
        rank = min(shape)
        left = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator))[0]
        right = torch.linalg.qr(torch.randn(shape[1], rank, generator=generator))[0]
        # The quintic starts at the Frobenius norm, so a spread that large is what it can take.
        spectrum = torch.linspace(1.0, 10.0, rank)
        matrix = ((left * spectrum) @ right.T).to(dtype)
        result = ours._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 5, 1e-7)
        self.assertEqual(result.dtype, torch.bfloat16)
        self.assertEqual(result.shape, shape)
        values = torch.linalg.svdvals(result.float())
        self.assertGreater(values.min().item(), 0.3)
        self.assertLess(values.max().item(), 1.25)
        # The singular vectors are kept: in their basis the result is diagonal.
        core = left.T @ result.float() @ right
        self.assertEqual(core, core.diag().diag(), atol=0.06, rtol=0)
        self.assertGreater(core.diag().min().item(), 0.25)

    @parametrize("nesterov", [True, False])
    def test_orthogonalizing_writes_no_input(self, nesterov):
        # Stock up to 2.14 normalizes a bfloat16 buffer in place when nesterov=False.
        grads = [make_matrix((6, 9), torch.bfloat16) for _ in range(3)]
        param = nn.Parameter(make_matrix((6, 9), torch.bfloat16))
        optimizer = Muon([param], nesterov=nesterov)
        expected = torch.zeros(6, 9, dtype=torch.bfloat16)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
            expected.lerp_(grad, 1 - 0.95)
            (momentum,) = self.buffers_of(optimizer, [param])
            self.assert_same_bits([momentum, param.grad], [expected, grad])
        # Without an iteration, the result is no view of the input.
        for dtype, shape in itertools.product(DTYPES, [(5, 9), (9, 5)]):
            with self.subTest(dtype=dtype, shape=shape):
                matrix = make_matrix(shape, dtype)
                before = matrix.clone()
                ours._zeropower_via_newtonschulz(matrix, COEFFICIENTS, 0, 1e-7).fill_(
                    7.0
                )
                self.assertEqual(matrix, before, rtol=0, atol=0)

    def test_optimizers_pickled_before_there_was_a_config(self):
        _, _, optimizer = self.run_steps(Muon, [(2, 3)])
        old = optimizer.__getstate__()
        old = {key: old[key] for key in ("defaults", "state", "param_groups")}
        old = copy.deepcopy(old)
        for group in (old["defaults"], *old["param_groups"]):
            for flag in NEW_FLAGS:
                del group[flag]
        restored = Muon.__new__(Muon)
        restored.__setstate__(old)
        for group in (restored.defaults, *restored.param_groups):
            with self.subTest(group=group):
                self.assertIsNone(group["foreach"])
                self.assertEqual(group["ns_algorithm"], "quintic")
        param = restored.param_groups[0]["params"][0]
        before = param.detach().clone()
        param.grad = torch.ones(2, 3)
        restored.step()
        self.assertNotEqual(param, before)
        restored.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
        self.assertEqual(len(restored.param_groups), 2)
        self.assertEqual(restored.assignments, {})


class TestNamesOfOneAlgorithm(MuonTestCase):
    """Upstream's proposal calls the quintic "standard". Ranks and checkpoints have one name."""

    OTHER = {"ns_algorithm": "standard"}

    def assert_quintic(self, *optimizers):
        for optimizer in optimizers:
            for group in (optimizer.defaults, *optimizer.param_groups):
                self.assertEqual(group["ns_algorithm"], "quintic")

    def test_constructor_and_groups(self):
        first, second, third = (nn.Parameter(torch.ones(2, 3)) for _ in range(3))
        optimizer = Muon([first], **self.OTHER)
        optimizer.add_param_group({"params": [second]})
        optimizer.add_param_group({"params": [third], **self.OTHER})
        self.assert_quintic(optimizer)
        self.assert_quintic(Muon([{"params": [first], **self.OTHER}]))

    def test_checkpoints(self):
        first, second = (Muon([nn.Parameter(torch.ones(2, 3))]) for _ in range(2))
        saved = first.state_dict()
        saved["param_groups"][0].update(self.OTHER)
        second.load_state_dict(saved)
        # A user may write into a group, and pickle the optimizer.
        first.param_groups[0].update(self.OTHER)
        first.defaults.update(self.OTHER)
        self.assert_quintic(second, pickle.loads(pickle.dumps(first)))


class TestUpstreamInputs(TestCase):
    """The inputs of upstream's own tests of all optimizers."""

    def test_errors(self):
        inputs = common_optimizers.optim_error_inputs_func_muon("cpu", torch.float32)
        refused = 0
        for error_input in inputs:
            given = error_input.optimizer_error_input
            construct = functools.partial(Muon, given.params, **given.kwargs)
            at_construction = common_optimizers.OptimizerErrorEnum.CONSTRUCTION_ERROR
            with self.subTest(given.desc):
                if error_input.error_on == at_construction:
                    call = construct
                else:
                    call = construct().step
                kind, words = error_input.error_type, error_input.error_regex
                if issubclass(kind, Warning):
                    assertion = self.assertWarnsRegex(kind, words)
                else:
                    assertion = self.assertRaisesRegex(kind, words)
                with assertion:
                    call()
                refused += 1
        self.assertGreaterEqual(refused, 7)

    @needs_stock
    def test_options(self):
        for given in common_optimizers.optim_inputs_func_muon("cpu"):
            with self.subTest(given.desc):
                start, *gradients = (make_matrix((6, 4)) for _ in range(3))
                trained = []
                for cls in (stock().Muon, Muon):
                    param = nn.Parameter(start.clone())
                    optimizer = cls([param], **copy.deepcopy(given.kwargs))
                    for gradient in gradients:
                        param.grad = gradient.clone()
                        optimizer.step()
                    trained.append(param.detach())
                self.assertTrue(torch.equal(*trained))


if __name__ == "__main__":
    common_utils.run_tests()
