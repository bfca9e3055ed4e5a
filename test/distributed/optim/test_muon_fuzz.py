# Owner(s): ["oncall: distributed"]
"""Random configurations: each trains as one process does.

One set of processes plays what is drawn here, on meshes and process groups of one to four of them. A plan
that fails is shrunk to the least that still does.
"""

from torch.testing._internal.common_distributed import requires_gloo
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.distributed._muon.fuzz_plans import WORLD
from torch.testing._internal.distributed._muon.fuzz_settings import (
    fuzz,
    skip_without_hypothesis,
)
from torch.testing._internal.distributed._muon.fuzz_strategies import plans
from torch.testing._internal.distributed._muon.fuzz_workers import Workers


skip_without_hypothesis(__name__)
from hypothesis import event, given


@requires_gloo()
class TestMuonFuzz(TestCase):
    world_size = WORLD

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.workers = Workers()

    @classmethod
    def tearDownClass(cls):
        cls.workers.end()
        super().tearDownClass()

    @fuzz(150)
    @given(plans())
    def test_trains_as_one_process(self, plan):
        event(plan.config.kind)
        found = enumerate(self.workers.play(plan))
        lines = [f"rank {rank}: {text}" for rank, texts in found for text in texts]
        # Not assertFalse, whose text would be cut.
        if lines:
            self.fail("\n".join(lines))


if __name__ == "__main__":
    run_tests()
