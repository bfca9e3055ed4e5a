"""The engine of a Muon with a ``distributed_config``: built together with the other ranks."""

import logging
from functools import partial
from typing import Any

from . import _muon_checks as checks
from ._muon_engine.engine import Engine
from ._muon_engine.params import Param
from ._muon_formulas import MuonFormulas


log = logging.getLogger("torch.optim.muon")


def new_engine(muon: Any) -> Engine:
    """Builds the engine of ``muon``, whose parameters may have changed since the last time."""
    params = live_params(muon)
    # They are about the parameters of the former engine.
    muon._hints = None
    takes_stacks = muon._allow_batched_matrices
    former = muon._engine
    # The other ranks wait for this one, so they learn of an error before it is raised.
    check = partial(checks.check_muon, muon)
    engine = Engine(
        muon._distributed_config, params, muon.state, takes_stacks, check, former
    )
    if log.isEnabledFor(logging.INFO) and engine.speaks and engine.plan.matrices:
        from ._muon_reports import in_a_line

        what = "rebuilt for changed parameters" if former else "built"
        log.info("Muon %s: %s", what, in_a_line(engine))
    return engine


def live_params(muon: Any) -> list[Param]:
    """The parameters of all groups, as an engine takes them."""
    formulas = [MuonFormulas.of_group(group) for group in muon.param_groups]
    params: list[Param] = []
    named = checks.named_params(muon.param_groups)
    for index, (param_group, name, tensor) in enumerate(named):
        of_group = formulas[param_group]
        params.append(Param(index, tensor, name, param_group, of_group))
    return params
