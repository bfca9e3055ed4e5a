# Owner(s): ["oncall: distributed"]
"""Configurations that nobody thought of: each trains as one process does, or is refused on all ranks.

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
    def test_trains_as_one_process_or_is_refused(self, plan):
        found = self.workers.play(plan)
        event(plan.config.kind)
        for line in {line for one in found for line in one["log"]}:
            event(line.split("(")[0] + line[line.rfind(":") :])
        problems = {
            r: one["problems"] for r, one in enumerate(found) if one["problems"]
        }
        # Not assertFalse, whose text would be cut.
        if problems:
            lines = [
                f"rank {r}: {text}" for r, texts in problems.items() for text in texts
            ]
            self.fail("\n".join(lines))


if __name__ == "__main__":
    run_tests()
