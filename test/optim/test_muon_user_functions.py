# Owner(s): ["module: optimizer"]
"""A user's functions, called by Muon.step(): one process plays several ranks."""

import threading

import torch
from torch import nn
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._muon.common_config import (
    all_to,
    ConfigTestCase,
    local_config,
    make_params,
)


class Mailbox:
    """All there is of a framework: letters between threads."""

    def __init__(self):
        self._letters = {}
        self._arrived = threading.Condition()

    def send(self, key, tensor):
        with self._arrived:
            if key in self._letters:
                raise RuntimeError(f"{key} was sent twice")
            self._letters[key] = tensor.clone()
            self._arrived.notify_all()

    def receive(self, key):
        with self._arrived:
            if not self._arrived.wait_for(lambda: key in self._letters, timeout=30):
                raise RuntimeError(f"{key} never came")
            return self._letters.pop(key)

    def __len__(self):
        return len(self._letters)


class RowShards:
    """A rank of a framework that cuts matrices by rows and is not torch.distributed."""

    def __init__(self, rank, world_size, mailbox, shapes, others_get):
        self.rank, self.mailbox, self.shapes = rank, mailbox, shapes
        self.others_get = others_get
        self.sizes = [self.rows(shape, world_size) for shape in shapes]
        self.state = {"rank": rank, "world_size": world_size}
        if others_get == "none":
            self.state["global_shapes"] = dict(enumerate(shapes))

    @staticmethod
    def rows(shape, world_size):
        return [len(c) for c in torch.arange(shape[0]).tensor_split(world_size)]

    def config(self, **options):
        return DistributedConfig(
            self.assign, self.gather, self.redistribute, self.state, **options
        )

    def mine(self, index, matrix):
        return matrix.split(self.sizes[index])[self.rank]

    def assign(self, params, state):
        world_size = state["world_size"]
        count = len(params)
        return {
            rank: list(range(rank, count, world_size)) for rank in range(world_size)
        }

    def gather(self, piece, owner, state):
        index = state["current_param_idx"]
        if self.rank != owner:
            self.mailbox.send(("piece", index, self.rank), piece)
            return (
                None
                if self.others_get == "none"
                else piece.new_empty(self.shapes[index])
            )
        pieces = [
            piece if rank == owner else self.mailbox.receive(("piece", index, rank))
            for rank in range(state["world_size"])
        ]
        return torch.cat(pieces)

    def redistribute(self, full, owner, state):
        index = state["current_param_idx"]
        if self.rank == owner:
            parts = full.split(self.sizes[index])
            for rank, part in enumerate(parts):
                if rank != owner:
                    self.mailbox.send(("update", index, rank), part)
            return parts[owner]
        if self.others_get == "none":
            if full is not None:
                raise RuntimeError("gather_fn returned None, and yet there is a tensor")
        elif full.shape != self.shapes[index] or full.count_nonzero():
            raise RuntimeError(f"expected zeros to receive into, got {full}")
        return self.mailbox.receive(("update", index, self.rank))


@instantiate_parametrized_tests
class TestAnotherFramework(ConfigTestCase):
    SHAPES = [(12, 4), (3, 9), (8, 8), (2, 5), (16, 2), (5, 5)]

    def run_ranks(self, world_size, target):
        """Runs ``target(rank)`` on threads; returns what they return, by rank."""
        results, errors = {}, []

        def run(rank):
            try:
                results[rank] = target(rank)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(rank,)) for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(world_size)]

    @parametrize("prefetch_count", [0, 1, 100])
    @parametrize("others_get", ["zeros", "none"])
    def test_equals_one_process(self, prefetch_count, others_get):
        world_size, mailbox = 3, Mailbox()
        options = {"lr": 0.05, "adjust_lr_fn": "match_rms_adamw"}
        steps = 3
        whole = make_params(*self.SHAPES)
        start = [p.detach().clone() for p in whole]
        generator = torch.Generator().manual_seed(5)
        grads = [
            [torch.randn(shape, generator=generator) for shape in self.SHAPES]
            for _ in range(steps)
        ]
        for step_grads in grads:
            # Parameter 3 has a gradient in one step only, on all ranks.
            step_grads[3] = step_grads[3] if step_grads is grads[1] else None

        single = Muon(whole, **options)
        for step_grads in grads:
            for param, grad in zip(whole, step_grads):
                param.grad = grad
            single.step()

        def train(rank):
            toy = RowShards(rank, world_size, mailbox, self.SHAPES, others_get)
            params = [nn.Parameter(toy.mine(i, p).clone()) for i, p in enumerate(start)]
            optimizer = Muon(
                params,
                distributed_config=toy.config(prefetch_count=prefetch_count),
                **options,
            )
            for step_grads in grads:
                for i, (param, grad) in enumerate(zip(params, step_grads)):
                    param.grad = None if grad is None else toy.mine(i, grad).clone()
                optimizer.step()
            buffers = [optimizer.state[p]["momentum_buffer"] for p in params]
            return params, buffers, optimizer.assignments

        results = self.run_ranks(world_size, train)
        self.assertEqual(len(mailbox), 0)
        for index, param in enumerate(whole):
            found = [
                torch.cat([result[kind][index].detach() for result in results])
                for kind in (0, 1)
            ]
            buffer = single.state[param]["momentum_buffer"]
            self.assert_same_bits(found, [param, buffer])
        for _, _, assignments in results:
            self.assertEqual(assignments, results[0][2])
            self.assertTrue(all(assignments.values()))

    def test_functions_that_communicate_nothing(self):
        # By their updates they move only what their own rank owns.
        params = make_params((4, 6), (6, 4), (3, 3))
        before = [p.detach().clone() for p in params]
        config = local_config(
            lambda params, state: {0: [0, 2], 1: [1]},
            state={"rank": 1, "world_size": 2},
        )
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


@instantiate_parametrized_tests
class TestUserFunctions(ConfigTestCase):
    @parametrize("prefetch_count", [0, 1, 5])
    def test_sequence_of_calls(self, prefetch_count):
        calls = []
        owner_of = [1, 0, 1, 1]

        def gather(piece, rank, state):
            calls.append(("gather", state["current_param_idx"]))
            self.assertEqual(rank, owner_of[state["current_param_idx"]])
            self.assertEqual(state["current_owner"], rank)
            return piece

        def redistribute(full, rank, state):
            calls.append(("redistribute", state["current_param_idx"]))
            self.assertEqual(rank, owner_of[state["current_param_idx"]])
            self.assertEqual(state["current_owner"], rank)
            return full

        config = DistributedConfig(
            lambda params, state: {1: [0, 2, 3], 0: [1]},
            gather,
            redistribute,
            {"rank": 0, "world_size": 2},
            prefetch_count=prefetch_count,
        )
        params = make_params(*[(2, 3)] * 4)
        # Whether there are gradients does not change the sequence.
        params[1].grad = params[2].grad = None
        optimizer = Muon(params, distributed_config=config)
        expected = [("gather", k) for k in range(min(prefetch_count + 1, 4))]
        for k in range(4):
            expected.append(("redistribute", k))
            if k + prefetch_count + 1 < 4:
                expected.append(("gather", k + prefetch_count + 1))
        for _ in range(2):
            calls.clear()
            optimizer.step()
            self.assertEqual(calls, expected)
        # Debugging keeps the order of the indices.
        config.async_gpu_parallelism = False
        debugged = Muon(params, distributed_config=config)
        calls.clear()
        debugged.step()
        self.assertEqual(calls, expected)

    @parametrize("dtype", [torch.float32, torch.bfloat16])
    @parametrize("nesterov", [True, False])
    def test_the_piece_may_be_written(self, dtype, nesterov):
        def gather(piece, rank, state):
            whole = piece.clone()
            piece.fill_(float("nan"))
            return whole

        config = local_config()
        config.gather_fn = gather
        shapes, options = [(4, 6), (6, 4)], {"dtype": dtype, "nesterov": nesterov}
        self.assert_same_bits(
            self.trained(config, *shapes, **options),
            self.trained(None, *shapes, **options),
        )

    def test_what_is_gathered(self):
        pieces = []

        def gather(piece, rank, state):
            pieces.append(piece.clone())
            return piece

        for nesterov in (True, False):
            config = local_config()
            config.gather_fn = gather
            (param,) = make_params((3, 4))
            optimizer = Muon(
                [param], momentum=0.9, nesterov=nesterov, distributed_config=config
            )
            optimizer.step()
            buffer = 0.1 * param.grad
            blended = 0.1 * param.grad + 0.9 * buffer if nesterov else buffer
            self.assertEqual(pieces.pop(), blended)

    def test_no_gradient(self):
        pieces = []

        def gather(piece, rank, state):
            pieces.append(piece.clone())
            return piece + 1

        config = local_config()
        config.gather_fn = gather
        config.redistribute_fn = lambda full, rank, state: full + 100
        (param,) = make_params((3, 4))
        grad, param.grad = param.grad, None
        before = param.detach().clone()
        optimizer = Muon([param], distributed_config=config)
        optimizer.step()
        buffer = optimizer.state[param]["momentum_buffer"]
        self.assert_same_bits([param, buffer], [before, torch.zeros(3, 4)])
        # With a buffer from an earlier step it is the same.
        param.grad = grad
        optimizer.step()
        param.grad = None
        before = [param.detach().clone(), buffer.clone()]
        optimizer.step()
        self.assert_same_bits([param, buffer], before)
        self.assert_same_bits(pieces[::2], [torch.zeros(3, 4)] * 2)

    def test_what_ranks_other_than_the_owner_get(self):
        fulls = []

        def redistribute(full, rank, state):
            fulls.append(full)
            return torch.zeros(2, 3)

        config = local_config(
            all_to(1),
            state={"rank": 0, "world_size": 2, "global_shapes": {0: (4, 3)}},
        )
        config.redistribute_fn = redistribute
        params = make_params((2, 3))
        optimizer = Muon(params, distributed_config=config)
        config.gather_fn = lambda piece, rank, state: torch.ones(4, 3)
        optimizer.step()
        self.assertEqual(fulls[0].float(), torch.zeros(4, 3))
        config.gather_fn = lambda piece, rank, state: None
        optimizer.step()
        self.assertIsNone(fulls[1])

    def test_learning_rate_scale_is_that_of_the_whole(self):
        # A rank of a framework that holds two rows of eight.
        def moved(gathered, state, adjust_lr_fn):
            config = local_config(
                all_to(1), state={"rank": 0, "world_size": 4, **state}
            )
            config.gather_fn = lambda piece, rank, state: gathered
            config.redistribute_fn = lambda full, rank, state: torch.ones(2, 2)
            param = nn.Parameter(torch.zeros(2, 2))
            param.grad = torch.ones(2, 2)
            optimizer = Muon(
                [param],
                lr=0.5,
                weight_decay=0.0,
                adjust_lr_fn=adjust_lr_fn,
                distributed_config=config,
            )
            optimizer.step()
            return -param.detach()[0, 0].item()

        for adjust_lr_fn, ratio in (
            ("original", 2.0),
            ("match_rms_adamw", 0.2 * 8**0.5),
            ("spectral_unclamped", 2.0),
        ):
            expected = 0.5 * ratio
            self.assertEqual(moved(torch.zeros(8, 2), {}, adjust_lr_fn), expected)
            given = {"global_shapes": {0: (8, 2)}}
            self.assertEqual(moved(None, given, adjust_lr_fn), expected)
        with self.assertWarnsRegex(UserWarning, r"global_shapes'\]\[0\]"):
            self.assertEqual(moved(None, {}, "original"), 0.5)

    def test_errors_of_the_functions(self):
        for gather, redistribute, words in (
            (lambda t, r, s: None, lambda t, r, s: t, "gather_fn returned None"),
            (lambda t, r, s: t, lambda t, r, s: None, "redistribute_fn returned None"),
            (lambda t, r, s: t, lambda t, r, s: 3, "redistribute_fn returned int"),
            (lambda t, r, s: t, lambda t, r, s: t[:1], r"shape \(1, 3\)"),
            (lambda t, r, s: t, lambda t, r, s: t.T, r"shape \(3, 2\)"),
        ):
            config = local_config()
            model = nn.Linear(3, 2, bias=False)
            model.weight.grad = torch.ones(2, 3)
            before = model.weight.detach().clone()
            optimizer = Muon(model.named_parameters(), distributed_config=config)
            config.gather_fn, config.redistribute_fn = gather, redistribute
            with self.assertRaisesRegex(RuntimeError, words) as seen:
                optimizer.step()
            self.assertIn("parameter 0 'weight'", str(seen.exception))
            self.assertIn("(2, 3)", str(seen.exception))
            self.assert_same_bits([model.weight], [before])
            self.assertNotIn("current_owner", config.state)

    def test_state_after_a_step(self):
        config = local_config(state={"mine": 1})
        optimizer = Muon(make_params((2, 2), (3, 3)), distributed_config=config)
        optimizer.step()
        self.assertNotIn("current_owner", config.state)
        self.assertEqual(config.state["mine"], 1)
        # The engine restores a value that the user had set.
        config.state["current_param_idx"] = 7
        optimizer.step()
        self.assertEqual(config.state["current_param_idx"], 7)

        def fail(full, rank, state):
            raise KeyboardInterrupt

        working, config.redistribute_fn = config.redistribute_fn, fail
        with self.assertRaises(KeyboardInterrupt):
            optimizer.step()
        self.assertNotIn("current_owner", config.state)
        self.assertEqual(config.state["current_param_idx"], 7)
        config.redistribute_fn = working
        before = optimizer.param_groups[0]["params"][0].detach().clone()
        optimizer.step()
        self.assertNotEqual(optimizer.param_groups[0]["params"][0], before)

    def test_state_of_built_functions_after_a_step(self):
        for make in (create_dtensor_config, create_auto_config):
            config = make()
            optimizer = Muon(make_params((2, 2)), distributed_config=config)
            optimizer.step()
            self.assertNotIn("current_owner", config.state)
            original = config.gather_fn
            config.gather_fn = lambda t, r, s: original(t, r, s)
            optimizer.step()
            self.assertNotIn("current_owner", config.state)
            # So that calls by hand are a round trip again.
            matrix = torch.randn(2, 2)
            self.assert_same_bits([original(matrix, 0, config.state)], [matrix])


if __name__ == "__main__":
    run_tests()
