# Owner(s): ["module: optimizer"]
"""A user's own functions in a distributed_config, on one process."""

import functools

import torch
from torch import nn
from torch.optim import Muon
from torch.optim.muon import (
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    all_to,
    local_config,
    make_params,
    MuonTestCase,
)


class TestUserFunctions(MuonTestCase):
    def test_functions_that_communicate_nothing(self):
        # By their updates they move only what their own rank owns.
        written = local_config(
            lambda params, state: {0: [0, 2], 1: [1]},
            state={"rank": 1, "world_size": 2},
        )
        # A factory's config for another framework.
        adapted = create_dtensor_config()
        adapted.state.update(written.state)
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            setattr(adapted, name, getattr(written, name))
        for config in (written, adapted):
            with self.subTest(config=config):
                params = make_params((4, 6), (6, 4), (3, 3))
                before = [p.detach().clone() for p in params]
                options = {"lr": 0.5, "weight_decay": 0.1}
                optimizer = Muon(params, distributed_config=config, **options)
                optimizer.step()
                alone = nn.Parameter(before[1].clone())
                alone.grad = params[1].grad
                Muon([alone], **options).step()
                decayed = [old * (1 - 0.5 * 0.1) for old in before]
                self.assert_same_bits(params, [decayed[0], alone, decayed[2]])
                # Momentum is everybody's.
                for param in params:
                    buffer = optimizer.state[param]["momentum_buffer"]
                    self.assertEqual(buffer, 0.05 * param.grad)
        # The factory's assign_fn sees only this process.
        adapted.assign_fn = create_dtensor_config().assign_fn
        optimizer = Muon(params, distributed_config=adapted)
        self.assertEqual(optimizer.assignments, {0: [0, 1, 2]})

    def test_sequence_of_calls(self):
        calls, owner_of = [], [1, 0, 1, 1]

        def noted(kind, tensor, rank, state):
            index = state["current_param_idx"]
            calls.append((kind, index))
            self.assertEqual([rank, state["current_owner"]], [owner_of[index]] * 2)
            return tensor

        for prefetch_count in (0, 1, 5):
            with self.subTest(prefetch_count=prefetch_count):
                config = DistributedConfig(
                    lambda params, state: {1: [0, 2, 3], 0: [1]},
                    functools.partial(noted, "gather"),
                    functools.partial(noted, "redistribute"),
                    {"rank": 0, "world_size": 2},
                    prefetch_count=prefetch_count,
                )
                params = make_params(*[(2, 3)] * 4)
                # Whether there are gradients does not change the sequence.
                params[1].grad = params[2].grad = None
                expected = [("gather", k) for k in range(min(prefetch_count + 1, 4))]
                for k in range(4):
                    expected.append(("redistribute", k))
                    if k + prefetch_count + 1 < 4:
                        expected.append(("gather", k + prefetch_count + 1))
                # Debugging keeps the order of the indices.
                for is_parallel in (True, False):
                    with self.subTest(is_parallel=is_parallel):
                        calls.clear()
                        config.async_gpu_parallelism = is_parallel
                        Muon(params, distributed_config=config).step()
                        self.assertEqual(calls, expected)

    def test_what_is_gathered_may_be_written(self):
        def gather(piece, rank, state):
            whole = piece.clone()
            piece.fill_(float("nan"))
            return whole

        config = local_config()
        config.gather_fn = gather
        for dtype, nesterov in ((torch.float32, True), (torch.bfloat16, False)):
            with self.subTest(dtype=dtype, nesterov=nesterov):
                options = {"dtype": dtype, "nesterov": nesterov}
                self.assert_same_training([(4, 6), (6, 4)], Muon, config, **options)

    def test_no_gradient(self):
        pieces, config = [], local_config()
        config.gather_fn = lambda piece, *_: pieces.append(piece.clone()) or piece + 1
        config.redistribute_fn = lambda full, rank, state: full + 100
        (param,) = make_params((3, 4))
        grad = param.grad
        optimizer = Muon([param], distributed_config=config)
        for given in (None, grad, None):
            with self.subTest(given=given):
                before = param.detach().clone()
                param.grad = given
                optimizer.step()
                self.assertEqual(torch.equal(param, before), given is None)
        self.assert_same_bits(pieces[::2], [torch.zeros(3, 4)] * 2)

    def test_what_ranks_other_than_the_owner_get(self):
        # A rank of a framework that holds two rows of eight. The scale is that of the whole.
        def moved(gathered, state, adjust_lr_fn):
            fulls = []

            def redistribute(full, rank, state):
                fulls.append(full)
                return torch.ones(2, 2)

            state = {"rank": 0, "world_size": 4, **state}
            config = local_config(all_to(1), state=state)
            config.gather_fn = lambda piece, rank, state: gathered
            config.redistribute_fn = redistribute
            param = nn.Parameter(torch.zeros(2, 2))
            param.grad = torch.ones(2, 2)
            options = {"adjust_lr_fn": adjust_lr_fn, "distributed_config": config}
            Muon([param], lr=0.5, weight_decay=0.0, **options).step()
            (full,) = fulls
            if gathered is None:
                self.assertIsNone(full)
            else:
                self.assertEqual(full.float(), torch.zeros(8, 2))
            return -param.detach()[0, 0].item()

        rms = 0.2 * 8**0.5
        cases = ("original", 2.0), ("match_rms_adamw", rms), ("spectral_unclamped", 2.0)
        for adjust_lr_fn, ratio in cases:
            with self.subTest(adjust_lr_fn=adjust_lr_fn, ratio=ratio):
                expected = 0.5 * ratio
                self.assertEqual(moved(torch.ones(8, 2), {}, adjust_lr_fn), expected)
                given = {"global_shapes": {0: (8, 2)}}
                self.assertEqual(moved(None, given, adjust_lr_fn), expected)
        with self.assertWarnsRegex(UserWarning, r"global_shapes'\]\[0\]"):
            self.assertEqual(moved(None, {}, "original"), 0.5)
        # The user's dict keeps its content.
        given = {"global_shapes": {}}
        with self.assertWarnsRegex(UserWarning, "global_shapes"):
            moved(None, given, "original")
        self.assertEqual(given, {"global_shapes": {}})

    def test_errors_of_the_functions(self):
        for gather, redistribute, words in (
            (lambda t, r, s: None, lambda t, r, s: t, "gather_fn returned None"),
            (lambda t, r, s: [t], lambda t, r, s: t, "gather_fn returned a list"),
            (lambda t, r, s: t, lambda t, r, s: None, "redistribute_fn returned None"),
            (lambda t, r, s: t, lambda t, r, s: 3, "redistribute_fn returned int"),
            (lambda t, r, s: t, lambda t, r, s: t[:1], r"shape \(1, 3\)"),
            (lambda t, r, s: t, lambda t, r, s: t.T, r"shape \(3, 2\)"),
        ):
            with self.subTest(gather=gather, redistribute=redistribute):
                config = local_config()
                model = nn.Linear(3, 2, bias=False)
                model.weight.grad = torch.ones(2, 3)
                before = model.weight.detach().clone()
                config.gather_fn, config.redistribute_fn = gather, redistribute
                optimizer = Muon(model.named_parameters(), distributed_config=config)
                with self.assertRaisesRegex(RuntimeError, words) as seen:
                    optimizer.step()
                self.assertIn("parameter 0 'weight'", str(seen.exception))
                self.assertIn("(2, 3)", str(seen.exception))
                self.assert_same_bits([model.weight], [before])
                self.assertNotIn("current_owner", config.state)

    def test_state_after_a_step(self):
        config = local_config(state={"mine": 1})
        working, fails = config.redistribute_fn, False

        def redistribute(full, rank, state):
            if fails:
                raise KeyboardInterrupt
            return working(full, rank, state)

        config.redistribute_fn = redistribute
        optimizer = Muon(make_params((2, 2), (3, 3)), distributed_config=config)
        # The engine restores a value that the user had set, after an error too.
        for given in ({"mine": 1}, {"mine": 1, "current_param_idx": 7}):
            with self.subTest(given=given):
                config.state.update(given)
                optimizer.step()
                self.assertEqual(config.state, given)
                fails = True
                with self.assertRaises(KeyboardInterrupt):
                    optimizer.step()
                self.assertEqual(config.state, given)
                fails = False
        before = optimizer.param_groups[0]["params"][0].detach().clone()
        optimizer.step()
        self.assertNotEqual(optimizer.param_groups[0]["params"][0], before)
        # The functions are read when Muon is built.
        config.redistribute_fn = working
        pattern = "redistribute_fn of the config changed"
        with self.assertRaisesRegex(ValueError, pattern):
            optimizer.step()


if __name__ == "__main__":
    run_tests()
