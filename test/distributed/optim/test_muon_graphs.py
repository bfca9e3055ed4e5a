# Owner(s): ["oncall: distributed"]
"""The graphs that the engine captures with ``keep_buffers=True``. A CPU plays what a GPU would repeat: the same
operations over the same memory.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed.tensor import Partial
from torch.optim._muon_engine.runtime.graphs import GraphMemory, Recording
from torch.optim._muon_engine.runtime.memory import Memory
from torch.optim._muon_formulas import MuonFormulas
from torch.optim._muon_reports import describe
from torch.optim.muon import create_dtensor_config
from torch.testing._internal.common_distributed import (
    MultiProcessTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon import common_muon
from torch.testing._internal.distributed._muon.common_muon import (
    grid_of,
    mesh_of,
    OnGPUs,
    R,
    S0,
    S1,
    Spec,
    specs,
    Twins,
    with_process_group,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Capture(TorchDispatchMode):
    """Notes operations. At its end, what they have written to memory that was there before is as before."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.saved = []
        # The addresses of storages that were there before, and of those that the operations made.
        self.former = set()
        self.own = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in self.own:
                self.former.add(pointer)
                # Not the whole storage: data may arrive in other parts of it.
                self.saved.append((tensor, tensor.clone()))
        result = operation(*args, **kwargs)
        for tensor in tensors_in(result):
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in self.former:
                self.own.add(pointer)
        self.calls.append((operation, args, kwargs, result))
        return result

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for tensor, content in reversed(self.saved):
            tensor.copy_(content)

    def replay(self):
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            for tensor, target in zip(tensors_in(again), tensors_in(result)):
                if tensor.data_ptr() != target.data_ptr():
                    target.copy_(tensor)


class PlayedMemory(GraphMemory):
    """Counts captures and replays."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.captures = 0
        self.replays = 0
        self.is_user_capturing = False

    def is_capturing(self):
        return self.is_user_capturing

    def capture(self, work):
        self.captures += 1
        with Capture() as captured:
            work()
        played = mock.Mock()

        def replay():
            self.replays += 1
            captured.replay()

        played.replay = replay
        return played


class TestMuonGraphs(common_muon.OnCPU):
    """Each test compares two engines, of which one captures and replays."""

    def pair(self, placed, **options):
        """Two optimizers with equal parameters. The memory of the first one has graphs."""
        pair = []
        for _ in range(2):
            config = create_dtensor_config(keep_buffers=True)
            twins = Twins(placed, config, **options)
            # Binds the lists of a step as on a GPU.
            binder = self.runner(twins.optimizer).binder
            binder.is_cpu = False
            binder.device = torch.device("cuda")
            common_muon.bind_again(twins.optimizer)
            pair.append(twins)
        self.memory(pair[0].optimizer)._of_graphs = PlayedMemory()
        return pair

    def runner(self, optimizer):
        return optimizer._engine._make_runner()

    def memory(self, optimizer):
        return self.runner(optimizer).memory

    def assertStepsAlike(self, pair, steps, missing=lambda step: ()):
        for step in range(steps):
            values = []
            for twins in pair:
                twins.set_gradients(missing(step))
                twins.optimizer.step()
                of_params = []
                for param in twins.params:
                    momentum = twins.optimizer.state[param]["momentum_buffer"]
                    of_params.append([param.to_local(), momentum.to_local()])
                values.append(of_params)
            with self.everywhere(f"step {step}"):
                self.assertEqual(*values, rtol=0, atol=0)

    def assertCounts(self, pair, captures_per_batch, replays_per_batch):
        with self.everywhere():
            captures, replays, batches = self.counts(pair)
            self.assertEqual(captures, captures_per_batch * batches)
            self.assertEqual(replays, replays_per_batch * batches)

    def counts(self, pair):
        """The captures and the replays of this rank, and its batches."""
        runner = self.runner(pair[0].optimizer)
        batches = []
        for bound in runner.compute.bound.values():
            batches += bound.batches
        memory = runner.memory._of_graphs
        return memory.captures, memory.replays, len(batches)

    def test_each_batch_is_captured_once(self):
        shapes = [(8, 6), (7, 5), (4, 16), (8, 6)]
        placed = specs(mesh_of(4), [(S0,), (S1,), (R,)], shapes)
        placed += specs(grid_of(2, 2), [(S0, R), (R, S1), (S0, S0)], shapes)
        pair = self.pair(placed)
        self.assertStepsAlike(pair, 1)
        self.assertCounts(pair, 0, 0)
        self.assertStepsAlike(pair, 3)
        self.assertCounts(pair, 1, 3)

    def test_sums(self):
        """Their contributions are added before what is recorded. An owner rounds its own one less, so one engine makes
        both trainings.
        """
        twins, _ = self.pair([Spec((8, 6), mesh_of(4), (Partial(),))])
        (param,) = twins.params
        start, values = param.detach().clone(), []
        for has_graphs in (True, False):
            if not has_graphs:
                self.memory(twins.optimizer)._of_graphs = None
                common_muon.bind_again(twins.optimizer)
                param.detach().copy_(start)
                twins.optimizer.state[param]["momentum_buffer"].zero_()
                twins.steps = 0
            for _ in range(4):
                twins.set_gradients()
                twins.optimizer.step()
            values.append(param.to_local().clone())
        with self.everywhere():
            self.assertEqual(*values, rtol=0, atol=0)

    def test_matrices_without_gradients_are_not_recorded(self):
        placed = specs(mesh_of(4), [(S0,)], [(8, 6)] * 24)
        pair = self.pair(placed, foreach=True)
        some, none = range(0, 24, 5), range(24)
        missing = [(), some, (), none, some, ()]
        self.assertStepsAlike(pair, len(missing), missing=missing.__getitem__)
        with self.everywhere():
            captures, replays, batches = self.counts(pair)
            self.assertLess(batches, 6)
            self.assertEqual(captures, batches)
            # In the third and in the last step; in others, where all their gradients are there.
            self.assertGreaterEqual(replays, 2 * batches)
            self.assertLessEqual(replays, 4 * batches)

    def test_options_of_batches_that_change(self):
        """The graphs of the former options are not used."""
        pair = self.pair(specs(mesh_of(4), [(S0,)], [(8, 6), (8, 6), (4, 16)]))
        self.assertStepsAlike(pair, 3)
        for name, value in (("ns_steps", 3), ("eps", 0.5), ("foreach", False)):
            for twins in pair:
                twins.optimizer.param_groups[0][name] = value
            self.assertStepsAlike(pair, 3)

    def test_numbers_of_each_step(self):
        """What changes without another batch is not part of a graph."""
        pair = self.pair(specs(mesh_of(4), [(S0,), (R,)], [(8, 6), (4, 16)]))
        for step in range(4):
            for twins in pair:
                twins.optimizer.param_groups[0].update(
                    lr=0.1 / (step + 1), momentum=0.5 + 0.1 * step, weight_decay=step
                )
            self.assertStepsAlike(pair, 1)
        self.assertCounts(pair, 1, 3)

    def test_memory_of_parameters_that_moves(self):
        """Graphs know only packs and whole matrices."""
        pair = self.pair(specs(mesh_of(4), [(S0,), (R,)], [(8, 6), (4, 16)]))
        self.assertStepsAlike(pair, 3)
        for twins in pair:
            for param in twins.params:
                momentum = twins.optimizer.state[param]["momentum_buffer"]
                for tensor in (param, momentum):
                    local = tensor.to_local().detach()
                    local.set_(local.clone())
        self.assertStepsAlike(pair, 3)
        self.assertCounts(pair, 1, 5)

    def test_parameters_that_are_replaced(self):
        """The next engine has graphs of its own."""
        pair = self.pair(specs(mesh_of(4), [(S0,), (R,)], [(8, 6), (4, 16)]))
        self.assertStepsAlike(pair, 3)
        former = self.memory(pair[0].optimizer)
        for twins in pair:
            twins.params[0] = torch.nn.Parameter(twins.params[0].detach().clone())
            twins.optimizer.param_groups[0]["params"][0] = twins.params[0]
        self.assertStepsAlike(pair, 2)
        self.assertIsNot(self.memory(pair[0].optimizer), former)

    def test_split(self):
        placed = specs(mesh_of(4), [(S0,)], [(12, 6), (12, 6), (8, 4)])
        groups = [([0], {"split": (4, 8)}), ([1, 2], {"ns_algorithm": "gram"})]
        pair = self.pair(placed, groups=groups)
        self.assertStepsAlike(pair, 4)
        self.assertCounts(pair, 1, 3)

    def test_inside_of_a_graph_of_the_users(self):
        pair = self.pair(specs(mesh_of(4), [(S0,)], [(8, 6), (4, 16)]))
        self.assertStepsAlike(pair, 1)
        self.memory(pair[0].optimizer)._of_graphs.is_user_capturing = True
        self.assertStepsAlike(pair, 2)
        self.assertCounts(pair, 0, 0)

    def test_batches_that_are_recorded_say_so(self):
        """Newton-Schulz chooses by it which products are the faster ones."""
        pair = self.pair(specs(mesh_of(4), [(S0,)], [(8, 6)] * 24), foreach=True)
        orthogonalize, seen = MuonFormulas.orthogonalize, []

        def noted(formulas, *args, in_graph=False, **kwargs):
            seen.append(in_graph)
            return orthogonalize(formulas, *args, in_graph=in_graph, **kwargs)

        with mock.patch.object(MuonFormulas, "orthogonalize", noted):
            for missing, expected in (((), True), ((), True), (range(1, 24), True)):
                seen.clear()
                pair[0].set_gradients(missing)
                pair[0].optimizer.step()
                of_ranks = common_muon.everyone({*seen})
                self.assertEqual(set().union(*of_ranks), {expected})


class Allocator:
    """Counts the graphs of each pool, as CUDA's caching allocator does: it refuses a pool whose graphs are gone."""

    def __init__(self):
        self.counts = {}
        self.modes = []
        # Of clearing the memory of cuBLAS, and of captures.
        self.calls = []

    def handle(self):
        return len(self.counts), object()

    def graph(self):
        return CountedGraph(self)

    def clear(self):
        self.calls.append("clear")


class CountedGraph:
    def __init__(self, allocator):
        self.allocator = allocator
        self.pool = None
        self.is_capturing = False

    def capture_begin(self, pool=None, capture_error_mode="global"):
        counts = self.allocator.counts
        if counts.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        counts[pool] = counts.get(pool, 0) + 1
        self.allocator.modes.append(capture_error_mode)
        self.allocator.calls.append("capture")
        self.is_capturing = True
        self.pool = pool

    def capture_end(self):
        self.is_capturing = False

    def __del__(self):
        if self.pool is not None:
            self.allocator.counts[self.pool] -= 1


class TestGraphMemory(TestCase):
    """What :class:`GraphMemory` asks of torch.cuda."""

    def setUp(self):
        super().setUp()
        self.allocator = Allocator()
        parts = {
            "CUDAGraph": self.allocator.graph,
            "graph_pool_handle": self.allocator.handle,
            "Stream": mock.Mock(),
            "stream": lambda stream: contextlib.nullcontext(),
        }
        clear = mock.patch.object(
            torch._C, "_cuda_clearCublasWorkspaces", self.allocator.clear, create=True
        )
        for patch in (mock.patch.multiple(torch.cuda, **parts), clear):
            patch.start()
            self.addCleanup(patch.stop)
        self.memory = GraphMemory(torch.device("cuda", 0))

    def test_graphs_share_one_pool(self):
        graphs = [self.memory.capture(lambda: None) for _ in range(3)]
        self.assertEqual([*self.allocator.counts.values()], [3])
        # Other threads, such as NCCL's, ask for events meanwhile.
        self.assertEqual(self.allocator.modes, ["thread_local"] * 3)
        self.assertFalse(any(graph.is_capturing for graph in graphs))
        # No graph uses the memory of another program's graphs for cuBLAS, nor the other way round.
        self.assertEqual(self.allocator.calls, ["clear", "capture", "clear"] * 3)

    def test_pools_whose_graphs_are_gone(self):
        """Options of batches have changed, which drops all graphs."""
        for _ in range(2):
            graphs = [self.memory.capture(lambda: None) for _ in range(2)]
            del graphs
        self.assertEqual([*self.allocator.counts.values()], [0, 0])

    def test_errors_end_a_capture(self):
        captured = []
        make = self.allocator.graph

        def graph():
            captured.append(make())
            return captured[-1]

        def fails():
            self.assertTrue(captured[-1].is_capturing)
            raise ValueError("own")

        with mock.patch.object(torch.cuda, "CUDAGraph", graph):
            with self.assertRaisesRegex(ValueError, "own"):
                self.memory.capture(fails)
        self.assertFalse(captured[-1].is_capturing)

    def test_which_memory_has_graphs(self):
        for kind, keep, hip, backend, has_gpu, expected in (
            ("cuda", True, None, "native", True, True),
            ("cuda", False, None, "native", True, False),
            ("cuda", True, "6.4", "native", True, False),
            ("cuda", True, None, "pluggable", True, False),
            ("cuda", True, None, "native", False, False),
            ("cpu", True, None, "native", True, False),
            ("xpu", True, None, "native", True, False),
        ):
            with (
                self.subTest(kind=kind, keep=keep, hip=hip, backend=backend),
                mock.patch.object(torch.version, "hip", hip),
                mock.patch.object(torch.cuda, "is_available", lambda: has_gpu),
                mock.patch.object(torch.cuda, "get_allocator_backend", lambda: backend),
            ):
                memory = Memory(torch.device(kind), keep)
                self.assertEqual(memory.recording() is not None, expected)

    def test_memory_that_graphs_keep_is_described(self):
        iterates, others = 3 * 2**20, 5 * 2**20
        for kind, keep, expected in (
            ("cuda", True, 3),
            ("cuda", False, 0),
            ("xpu", True, 0),
            ("cpu", True, 0),
        ):
            engine = SimpleNamespace(
                schedule=SimpleNamespace(buckets=()),
                rank=0,
                config=SimpleNamespace(prefetch_count=1, state={"keep_buffers": keep}),
                device=torch.device(kind),
            )
            with (
                self.subTest(kind=kind, keep=keep),
                mock.patch.object(
                    describe, "_workspace", lambda *_: (iterates, others)
                ),
            ):
                found = describe._memory(engine)
                self.assertIn(f"keeps {expected} MiB", found)
                self.assertIn("takes up to 5 MiB", found)


class TestRecording(common_muon.OnCPU):
    def test_no_memory_for_a_capture(self):
        """The host goes on launching."""
        memory, done = PlayedMemory(), []

        def refuses(work):
            raise torch.OutOfMemoryError("full")

        recording = Recording(memory)
        with mock.patch.object(
            memory, "capture", mock.Mock(side_effect=refuses)
        ) as capture:
            for step in range(4):
                recording.run(lambda step=step: done.append(step))
            self.assertEqual(capture.call_count, 1)
        self.assertEqual(done, [0, 1, 2, 3])

    def test_an_error_while_capturing(self):
        """The next call captures again."""
        memory, done = PlayedMemory(), []
        recording = Recording(memory)
        recording.run(lambda: done.append("first"))

        def fails():
            raise ValueError("own")

        with self.assertRaisesRegex(ValueError, "own"):
            recording.run(fails)
        recording.run(lambda: done.append("again"))
        self.assertEqual(done, ["first", "again"])
        self.assertEqual((memory.captures, memory.replays), (2, 1))


class OnGPU(OnGPUs):
    """Each training is made with graphs and without."""

    def trained(self, has_graphs, **options):
        """Parameters and momenta after some steps, one of them without some gradients, and the number of graphs."""
        mesh = mesh_of(self.world_size)
        placed = specs(mesh, [(S0,), (S1,)], [(64, 96), (100, 60), (33, 70)])
        # Enough for Triton's products on each owner.
        placed += specs(mesh, [(S0,)], [(1024, 2048)] * 16)
        twins = Twins(placed, create_dtensor_config(keep_buffers=True), **options)
        captures = []
        capture, run = GraphMemory.capture, Recording.run

        def counted(memory, work):
            captures.append(work)
            return capture(memory, work)

        with (
            mock.patch.object(GraphMemory, "capture", counted),
            mock.patch.object(
                Recording, "run", run if has_graphs else lambda _, work: work()
            ),
        ):
            for missing in ((), (), (0, 7), (), ()):
                twins.set_gradients(missing)
                twins.optimizer.step()
        values = []
        for param in twins.params:
            momentum = twins.optimizer.state[param]["momentum_buffer"]
            values += [param.detach().to_local(), momentum.to_local()]
        return values, len(captures)

    def check_bits(self):
        for options in ({}, {"fused": True}, {"ns_algorithm": "gram", "fused": True}):
            expected, captures = self.trained(False, **options)
            self.assertEqual(captures, 0)
            found, captures = self.trained(True, **options)
            self.assertGreater(captures, 0)
            self.assertEqual(found, expected, rtol=0, atol=0)


class TestMuonGraphsOnOneGPU(OnGPU, MultiProcessTestCase):
    world_size = 1

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_bits(self):
        self.check_bits()

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_graph_of_the_user(self):
        """It contains the work of the engine's own graphs."""
        placed = specs(mesh_of(1), [(S0,)], [(64, 96), (100, 60)])
        lists = []
        for is_recorded in (True, False):
            config = create_dtensor_config(keep_buffers=True)
            lr = torch.tensor(0.02, device=common_muon.device())
            twins = Twins(placed, config, lr=lr)
            twins.set_gradients()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(3):
                    twins.optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            step = twins.optimizer.step
            if is_recorded:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    twins.optimizer.step()
                step = graph.replay
            for _ in range(3):
                step()
            lists.append([param.detach().to_local() for param in twins.params])
        self.assertEqual(*lists, rtol=0, atol=0)


class TestMuonGraphsOnSharedGPU(OnGPU, MultiProcessTestCase):
    """With collectives in flight while a rank captures."""

    backend = "gloo"
    world_size = 4

    @skip_if_lt_x_gpu(1)
    @with_process_group
    def test_bits(self):
        self.check_bits()


if __name__ == "__main__":
    run_tests()
