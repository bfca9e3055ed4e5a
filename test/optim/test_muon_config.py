# Owner(s): ["module: optimizer"]
"""Muon's distributed_config on one process: what it takes, refuses and keeps."""

import copy
import functools
import itertools
import pickle
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Muon
from torch.optim.muon import (
    create_auto_config,
    create_dtensor_config,
    DistributedConfig,
)
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed._muon.common_config import (
    all_to,
    local_config,
    make_params,
    MuonTestCase,
    randn,
)


# Without a group, a TP dimension moves no data.
FACTORIES = (
    create_dtensor_config,
    functools.partial(create_auto_config, tp_dim_per_param={0: 1}),
)
MAKES = (local_config, *FACTORIES)
SHAPES = [(4, 6), (6, 4), (5, 5)]


class TestDistributedConfig(MuonTestCase):
    def test_assign_fn_coverage(self):
        assignments = {0: [0, 4], 1: [1, 5], 2: [2, 6], 3: [3, 7]}
        state = {"rank": 0, "world_size": 4}
        config = local_config(lambda params, state: assignments, state=state)
        optimizer = Muon(make_params(*[(10, 10)] * 8), distributed_config=config)
        self.assertEqual(optimizer.assignments, assignments)

    def test_tp_dim_per_param_validation(self):
        for name, tp_dims, key in (
            ("tp_dim_per_param", {0: 0, 1: 1, 2: 0}, "tp_dim_per_param"),
            ("tp_dim_per_param", 1, "tp_dim_default"),
            # Zero is a dimension, not a missing one.
            ("tp_shard_dim", 0, "tp_dim_default"),
            ("tp_shard_dim", None, None),
        ):
            with self.subTest(name=name, tp_dims=tp_dims):
                state = create_auto_config(**{name: tp_dims}).state
                found = {key: state[key] for key in state if key.startswith("tp_dim")}
                self.assertEqual(found, {key: tp_dims} if key else {})

    def test_refused_arguments(self):
        shard, replicate = "shard_process_group", "replicate_process_group"
        for given, words in (
            ({"prefetch_count": -1}, "prefetch_count.*-1"),
            ({"prefetch_count": True}, "prefetch_count.*True"),
            ({"fsdp_process_group": 0, shard: 0}, f"fsdp_.*{shard}"),
            ({"ddp_process_group": 0, replicate: 0}, f"ddp_.*{replicate}"),
            ({"tp_dim_per_param": 0, "tp_shard_dim": 0}, "per_param.*tp_shard_dim"),
            ({"ep_process_group": 0}, "expert_assignments"),
            ({"expert_assignments": {0: 3, 2: 1}}, r"names.*\[2\].* 2 parameters, no"),
            ({"expert_assignments": {"w": 1}}, r"names parameters \['w'\]"),
            # new_group() returns this on a rank that is not in the group.
            ({"tp_process_group": dist.GroupMember.NON_GROUP_MEMBER}, "with this rank"),
        ):
            with self.subTest(given=given):
                with self.assertRaisesRegex(ValueError, words):
                    config = create_auto_config(**given)
                    Muon(make_params((2, 2), (3, 3)), distributed_config=config)
        for wrong, words in (({}, "dict"), ("A", "'A'")):
            words = f'DistributedConfig or "auto" but is {words}'
            with self.subTest(words), self.assertRaisesRegex(TypeError, words):
                Muon(make_params((4, 4)), distributed_config=wrong)

    def test_state(self):
        given = {"expert_assignments": {0: 1}, "pp_process_group": object()}
        given |= {"pp_stage_id": 1, "pp_num_stages": 4}
        state = create_auto_config(**given).state
        self.assertLessEqual(given.items(), state.items())
        self.assertIsNot(state["expert_assignments"], given["expert_assignments"])
        self.assertIs(state["is_dtensor"], False)

    def test_compiled_step_is_compiled_once(self):
        """It was compiled again because the engine's count of steps had changed."""
        (param,) = params = make_params((4, 4))
        step = torch.compile(
            Muon(params, distributed_config="auto").step, backend="eager"
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                before = param.detach().clone()
                step()
                self.assertNotEqual(param.detach(), before)

    def test_a_copy_does_not_go_on_alone(self):
        duplicates = copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))
        for make, duplicate in itertools.product(MAKES, duplicates):
            with self.subTest(make=make, duplicate=duplicate):
                optimizer = Muon(make_params((2, 3)), distributed_config=make())
                optimizer.step()
                duplicated = duplicate(duplicate(optimizer))
                # A checkpoint does not make it forget.
                duplicated.load_state_dict(optimizer.state_dict())
                with self.assertRaisesRegex(RuntimeError, "distributed_config"):
                    duplicated.step()
                # The original does not mind.
                optimizer.step()


class TestMuonErrors(MuonTestCase):
    def assertRefused(self, assignments, pattern):
        """By an ``assign_fn`` for two ranks and four parameters."""
        state = {"rank": 0, "world_size": 2}
        config = local_config(lambda params, state: assignments, state=state)
        with self.assertRaisesRegex(AssertionError, pattern):
            Muon(make_params(*[(10, 10)] * 4), distributed_config=config)

    def test_incomplete_assignment_raises(self):
        self.assertRefused(
            {0: [0, 1], 1: []}, "parameter 2 .* missing, parameter 3 .* missing"
        )

    def test_overlapping_assignment_raises(self):
        # Parameter 0 stands twice, and 3 nowhere.
        self.assertRefused(
            {0: [0, 1], 1: [0, 2]}, "parameter 0 .* 2 times, parameter 3 .* missing"
        )
        self.assertRefused({0: [0, 0, 1], 1: [2, 3]}, "parameter 0 .* 2 times")

    def test_wrong_tp_dim_raises(self):
        param = torch.randn(10, 20)
        for dims in ({0: 3}, -3):
            config = create_auto_config(tp_process_group=None, tp_dim_per_param=dims)
            for call in (
                lambda: config.gather_fn(param, 0, config.state),
                lambda: config.redistribute_fn(param, 0, config.state),
                lambda: config.assign_fn([param], config.state),
                lambda: Muon([param], distributed_config=config),
            ):
                with self.subTest(dims=dims, call=call):
                    with self.assertRaisesRegex(IndexError, "parameter 0"):
                        call()
        # Only the parameter that is gathered counts.
        config = create_auto_config(tp_dim_per_param={1: 3})
        self.assertEqual(config.gather_fn(param, 0, config.state), param)

    def test_functions_of_a_factory_in_a_config_that_does_not_know_them(self):
        built = create_auto_config()
        wrapped = map(functools.partial, (built.gather_fn, built.redistribute_fn))
        config = DistributedConfig(all_to(0), *wrapped, {})
        optimizer = Muon(make_params((4, 4)), distributed_config=config)
        with self.assertRaisesRegex(RuntimeError, "state of their config"):
            optimizer.step()


class TestUserFunctions(MuonTestCase):
    """A user's own functions."""

    def test_functions_that_communicate_nothing(self):
        """By their updates they move only what their own rank owns."""
        # A factory's config for another framework.
        config = create_dtensor_config()
        config.state.update({"rank": 1, "world_size": 2})
        config.assign_fn = lambda params, state: {0: [0, 2], 1: [1]}
        written = local_config()
        config.gather_fn = written.gather_fn
        config.redistribute_fn = written.redistribute_fn
        options = {"lr": 0.5, "weight_decay": 0.1}
        params = make_params((4, 6), (6, 4), (3, 3))
        alone = make_params((4, 6), (6, 4), (3, 3))
        expected = [param.detach() * (1 - 0.5 * 0.1) for param in params]
        optimizer = Muon(params, distributed_config=config, **options)
        with self.assertWarnsRegex(UserWarning, "replicas diverge"):
            optimizer.step()
        single = Muon(alone, **options)
        single.step()
        expected[1] = alone[1]
        self.assert_same_bits(params, expected)
        # Momentum is everybody's.
        momenta = self.buffers_of(single, alone)
        self.assert_same_bits(self.buffers_of(optimizer, params), momenta)

    def test_sequence_of_calls(self):
        calls, owner_of = [], [1, 0, 1, 1]

        def noted(kind, tensor, rank, state):
            index = state["current_param_idx"]
            calls.append(f"{kind}{index}")
            self.assertEqual([rank, state["current_owner"]], [owner_of[index]] * 2)
            return tensor

        params = make_params(*[(2, 3)] * 4)
        # Whether there are gradients does not change the sequence.
        params[1].grad = params[2].grad = None
        for prefetch_count, expected in (
            (0, "G0 R0 G1 R1 G2 R2 G3 R3"),
            (1, "G0 G1 R0 G2 R1 G3 R2 R3"),
            (5, "G0 G1 G2 G3 R0 R1 R2 R3"),
        ):
            # Debugging keeps the order of the indices.
            for is_parallel in (True, False):
                with self.subTest(prefetch_count=prefetch_count, parallel=is_parallel):
                    calls.clear()
                    config = DistributedConfig(
                        lambda params, state: {1: [0, 2, 3], 0: [1]},
                        functools.partial(noted, "G"),
                        functools.partial(noted, "R"),
                        {"rank": 0, "world_size": 2},
                        is_parallel,
                        prefetch_count,
                    )
                    Muon(params, distributed_config=config).step()
                    self.assertEqual(" ".join(calls), expected)

    def test_what_is_gathered_may_be_written(self):
        def gather(piece, rank, state):
            whole = piece.clone()
            piece.fill_(float("nan"))
            return whole

        config = local_config()
        config.gather_fn = gather
        for nesterov in (True, False):
            options = {"dtype": torch.bfloat16, "nesterov": nesterov}
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

        def moved(gathered, **more):
            fulls = []

            def redistribute(full, rank, state):
                fulls.append(full)
                return torch.ones(2, 2)

            state = {"rank": 0, "world_size": 4, **more}
            config = local_config(all_to(1), state=state)
            config.gather_fn = lambda piece, rank, state: gathered
            config.redistribute_fn = redistribute
            param = nn.Parameter(torch.zeros(2, 2))
            param.grad = torch.ones(2, 2)
            Muon([param], lr=0.5, weight_decay=0.0, distributed_config=config).step()
            received = None if gathered is None else torch.zeros(8, 2)
            self.assertEqual(fulls, [received], exact_dtype=False)
            return -param.detach()[0, 0].item()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual(moved(torch.ones(8, 2)), 0.5 * 2)
            self.assertEqual(moved(None, global_shapes={0: (8, 2)}), 0.5 * 2)
        with self.assertWarnsRegex(UserWarning, r"global_shapes'\]\[0\]"):
            self.assertEqual(moved(None), 0.5)

    def test_errors_of_the_functions(self):
        for make, name, result, words in (
            (
                local_config,
                "gather_fn",
                lambda t: None,
                "gather_fn returned a NoneType",
            ),
            (local_config, "gather_fn", lambda t: [t], "gather_fn returned a list"),
            (
                local_config,
                "redistribute_fn",
                lambda t: None,
                "redistribute_fn returned None",
            ),
            (local_config, "redistribute_fn", lambda t: t.T, r"shape \(3, 2\)"),
            (
                create_dtensor_config,
                "gather_fn",
                lambda t: t.T,
                "needs the whole update",
            ),
        ):
            with self.subTest(words):
                config, (param,) = make(), make_params((2, 3))
                before = param.detach().clone()
                setattr(config, name, lambda t, *_, result=result: result(t))
                optimizer = Muon([("weight", param)], distributed_config=config)
                with self.assertRaisesRegex(RuntimeError, words) as seen:
                    optimizer.step()
                self.assertIn("parameter 0 'weight'", str(seen.exception))
                self.assertIn("(2, 3)", str(seen.exception))
                self.assert_same_bits([param], [before])

    def test_state_after_a_step(self):
        """The engine restores a value that the user had set, after an error too."""
        config, params = local_config(), make_params((2, 2))
        working = config.redistribute_fn
        given = {"mine": 1, "current_param_idx": 7}
        config.state.update(given)

        def redistribute(full, rank, state):
            raise KeyboardInterrupt

        config.redistribute_fn = redistribute
        optimizer = Muon(params, distributed_config=config)
        with self.assertRaises(KeyboardInterrupt):
            optimizer.step()
        self.assertEqual(config.state, given)
        # The functions are read when Muon is built.
        config.redistribute_fn = working
        pattern = "redistribute_fn of the config changed"
        with self.assertRaisesRegex(ValueError, pattern):
            optimizer.step()


class TestGroups(MuonTestCase):
    def test_indices_follow_the_groups(self):
        seen = []

        def assign_fn(params, state):
            seen.append([tuple(param.shape) for param in params])
            return all_to(3)(params, state)

        first, second, third = make_params((2, 2), (3, 3), (4, 4))
        config = local_config(assign_fn, state={"rank": 2, "world_size": 4})
        groups = [{"params": [second]}, {"params": [first]}]
        optimizer = Muon(groups, distributed_config=config)
        optimizer.add_param_group({"params": [third]})
        self.assertEqual(seen, [[(3, 3), (2, 2)], [(3, 3), (2, 2), (4, 4)]])
        self.assertEqual(optimizer.current_rank, 2)
        # It is a copy.
        optimizer.assignments[3].append(7)
        self.assertEqual(optimizer.assignments, {3: [0, 1, 2]})

    def test_add_param_group(self):
        expected = None
        for make in (lambda: None, *MAKES):
            with self.subTest(make=make):
                params, config = make_params(*SHAPES), make()
                optimizer = Muon(params[:2], lr=0.05, distributed_config=config)
                optimizer.step()
                # A group that is refused changes nothing.
                with self.assertRaisesRegex(ValueError, "only supports 2D"):
                    optimizer.add_param_group({"params": make_params((3,))})
                if config is not None:
                    tied = "parameter 2 and parameter 3 are the same"
                    with self.assertRaisesRegex(ValueError, tied):
                        optimizer.add_param_group({"params": params[2:] * 2})
                    working = config.assign_fn
                    config.assign_fn = lambda params, state: {0: [0, 1]}
                    with self.assertRaisesRegex(AssertionError, "missing"):
                        optimizer.add_param_group({"params": params[2:]})
                    config.assign_fn = working
                    self.assertEqual(optimizer.assignments, {0: [0, 1]})
                optimizer.step()
                optimizer.add_param_group({"params": params[2:], "lr": 0.5})
                optimizer.step()
                expected = expected or params
                self.assert_same_bits(params, expected)

    def test_a_frozen_parameter_stays(self):
        (frozen,) = make_params((3, 4))
        before = frozen.detach().clone()
        frozen.requires_grad_(False)
        optimizer = Muon([frozen], distributed_config="auto")
        optimizer.step()
        self.assert_same_bits([frozen], [before])
        self.assertNotIn(frozen, optimizer.state)
        self.assertEqual(optimizer.assignments, {0: [0]})
        # And moves once it is frozen no more.
        frozen.requires_grad_(True)
        optimizer.step()
        self.assertNotEqual(frozen, before)


class TestReplaced(MuonTestCase):
    def train(self, change):
        """Trains before and after a change, as a Muon without a config does from the start."""

        def between(optimizer, step):
            if step == 2:
                change(optimizer, optimizer.param_groups[0]["params"])

        options = {"named": True, "steps": 4, "between": between, "lr": 0.1}
        for make in FACTORIES:
            with self.subTest(make=make, change=change):
                self.assert_same_training([(8, 8)] * 2, Muon, make(), **options)

    def test_larger_matrix(self):
        """An 8x8 matrix became a 16x8 one. Half of its rows were trained, without an error."""

        def fill(optimizer, params):
            if optimizer.assignments:
                params[0].grad = None
                params[0].data = randn(7, 16, 8)
            else:
                # Stock Muon cannot continue with a buffer of another shape.
                del optimizer.state[params[0]]
                params[0] = nn.Parameter(randn(7, 16, 8))

        self.train(fill)

    def test_another_shape_for_a_while(self):
        """Memory savers take the values of a parameter away. A checkpoint meanwhile leaves its momentum."""

        def save(optimizer, params):
            values = params[0].data
            params[0].data = values.new_empty(0, 0)
            optimizer.state_dict()
            params[0].data = values

        self.train(save)

    def test_moved_to_another_group(self):
        """The order of all parameters stays the same, but one of them gets other options."""

        def move(optimizer, params):
            added = nn.Parameter(randn(9, 3, 7))
            optimizer.add_param_group({"params": [("added", added)], "lr": 0.5})
            first, second = optimizer.param_groups
            for key in ("params", "param_names"):
                second[key].insert(0, first[key].pop())

        self.train(move)

    def test_parameters_come_and_go(self):
        *params, new = make_params(*[(4, 4)] * 4)
        config = create_auto_config(expert_assignments={2: 7})
        optimizer = Muon(params, distributed_config=config)
        now = optimizer.param_groups[0]["params"]
        for name, change, moving in (
            ("the first one goes", lambda: now.pop(0), params[1]),
            ("the last one goes", now.pop, params[1]),
            ("another one comes", lambda: now.append(new), new),
            ("one comes again", lambda: now.append(params[2]), params[2]),
        ):
            with self.subTest(name):
                before = moving.detach().clone()
                # The closure makes the change.
                optimizer.step(change)
                self.assertNotEqual(moving, before)


if __name__ == "__main__":
    run_tests()
