# Owner(s): ["module: optimizer"]
"""A user's own functions in a distributed_config, on one process."""

import functools

import torch
from torch import nn
from torch.optim import Muon
from torch.optim.muon import create_dtensor_config, DistributedConfig
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    all_to,
    local_config,
    make_params,
    MuonTestCase,
)


class TestUserFunctions(MuonTestCase):
    def test_functions_that_communicate_nothing(self):
        """By their updates they move only what their own rank owns."""
        state = {"rank": 1, "world_size": 2}
        written = local_config(lambda params, state: {0: [0, 2], 1: [1]}, state=state)
        # A factory's config for another framework.
        adapted = create_dtensor_config()
        adapted.state.update(state)
        for name in ("assign_fn", "gather_fn", "redistribute_fn"):
            setattr(adapted, name, getattr(written, name))
        options = {"lr": 0.5, "weight_decay": 0.1}
        for config in (written, adapted):
            with self.subTest(config=config):
                params = make_params((4, 6), (6, 4), (3, 3))
                alone = make_params((4, 6), (6, 4), (3, 3))
                expected = [param.detach() * (1 - 0.5 * 0.1) for param in params]
                optimizer = Muon(params, distributed_config=config, **options)
                optimizer.step()
                single = Muon(alone, **options)
                single.step()
                expected[1] = alone[1]
                self.assert_same_bits(params, expected)
                # Momentum is everybody's.
                momenta = self.buffers_of(single, alone)
                self.assert_same_bits(self.buffers_of(optimizer, params), momenta)
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

        def order(prefetch_count):
            for k in range(-prefetch_count - 1, 4):
                if k >= 0:
                    yield "redistribute", k
                if k + prefetch_count + 1 < 4:
                    yield "gather", k + prefetch_count + 1

        params = make_params(*[(2, 3)] * 4)
        # Whether there are gradients does not change the sequence.
        params[1].grad = params[2].grad = None
        for prefetch_count in (0, 1, 5):
            # Debugging keeps the order of the indices.
            for is_parallel in (True, False):
                with self.subTest(prefetch_count=prefetch_count, parallel=is_parallel):
                    calls.clear()
                    config = DistributedConfig(
                        lambda params, state: {1: [0, 2, 3], 0: [1]},
                        functools.partial(noted, "gather"),
                        functools.partial(noted, "redistribute"),
                        {"rank": 0, "world_size": 2},
                        is_parallel,
                        prefetch_count,
                    )
                    Muon(params, distributed_config=config).step()
                    self.assertEqual(calls, [*order(prefetch_count)])

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
        """The calls are made, with zeros, and their result is not applied."""
        pieces, config = [], local_config()
        config.gather_fn = lambda piece, *_: pieces.append(piece.clone()) or piece + 1
        config.redistribute_fn = lambda full, rank, state: full + 100
        (param,) = make_params((3, 4))
        optimizer = Muon([param], distributed_config=config)
        for grad in (None, param.grad, None):
            before = param.detach().clone()
            param.grad = grad
            optimizer.step()
            self.assertEqual(torch.equal(param, before), grad is None)
        self.assert_same_bits(pieces[::2], [torch.zeros(3, 4)] * 2)

    def test_what_ranks_other_than_the_owner_get(self):
        """A rank of a framework holds two rows of eight. The scale is that of the whole."""

        def moved(gathered, adjust_lr_fn="original", **more):
            fulls = []
            state = {"rank": 0, "world_size": 4, **more}
            config = local_config(all_to(1), state=state)
            config.gather_fn = lambda piece, rank, state: gathered
            config.redistribute_fn = lambda full, rank, state: (
                fulls.append(full) or torch.ones(2, 2)
            )
            param = nn.Parameter(torch.zeros(2, 2))
            param.grad = torch.ones(2, 2)
            options = {"adjust_lr_fn": adjust_lr_fn, "distributed_config": config}
            Muon([param], lr=0.5, weight_decay=0.0, **options).step()
            received = None if gathered is None else torch.zeros(8, 2)
            self.assertEqual(fulls, [received], exact_dtype=False)
            return -param.detach()[0, 0].item()

        rms = 0.2 * 8**0.5
        for name, ratio in (
            ("original", 2.0),
            ("match_rms_adamw", rms),
            ("spectral_unclamped", 2.0),
        ):
            with self.subTest(name):
                self.assertEqual(moved(torch.ones(8, 2), name), 0.5 * ratio)
                shapes = {0: (8, 2)}
                self.assertEqual(moved(None, name, global_shapes=shapes), 0.5 * ratio)
        # The user's dict keeps its content.
        shapes = {}
        for state in ({}, {"global_shapes": shapes}):
            with self.assertWarnsRegex(UserWarning, r"global_shapes'\]\[0\]"):
                self.assertEqual(moved(None, **state), 0.5)
        self.assertEqual(shapes, {})

    def test_errors_of_the_functions(self):
        for name, result, words in (
            ("gather_fn", lambda t: None, "gather_fn returned None"),
            ("gather_fn", lambda t: [t], "gather_fn returned a list"),
            ("redistribute_fn", lambda t: None, "redistribute_fn returned None"),
            ("redistribute_fn", lambda t: 3, "redistribute_fn returned int"),
            ("redistribute_fn", lambda t: t[:1], r"shape \(1, 3\)"),
            ("redistribute_fn", lambda t: t.T, r"shape \(3, 2\)"),
        ):
            with self.subTest(words):
                config, (param,) = local_config(), make_params((2, 3))
                before = param.detach().clone()
                setattr(config, name, lambda t, *_, result=result: result(t))
                optimizer = Muon([("weight", param)], distributed_config=config)
                with self.assertRaisesRegex(RuntimeError, words) as seen:
                    optimizer.step()
                self.assertIn("parameter 0 'weight'", str(seen.exception))
                self.assertIn("(2, 3)", str(seen.exception))
                self.assert_same_bits([param], [before])

    def test_state_after_a_step(self):
        config, params = local_config(state={"mine": 1}), make_params((2, 2), (3, 3))
        working, fails = config.redistribute_fn, False

        def redistribute(full, rank, state):
            if fails:
                raise KeyboardInterrupt
            return working(full, rank, state)

        config.redistribute_fn = redistribute
        optimizer = Muon(params, distributed_config=config)
        # The engine restores a value that the user had set, after an error too.
        for given in ({"mine": 1}, {"mine": 1, "current_param_idx": 7}):
            config.state.update(given)
            before, fails = params[0].detach().clone(), False
            optimizer.step()
            self.assertEqual(config.state, given)
            self.assertNotEqual(params[0], before)
            fails = True
            with self.assertRaises(KeyboardInterrupt):
                optimizer.step()
            self.assertEqual(config.state, given)
        # The functions are read when Muon is built.
        config.redistribute_fn = working
        pattern = "redistribute_fn of the config changed"
        with self.assertRaisesRegex(ValueError, pattern):
            optimizer.step()


if __name__ == "__main__":
    run_tests()
