"""The faults: of the kind that leaves most steps running, each with the tests that should notice."""

from __future__ import annotations

from .fault import Fault


HERE = "test/distributed/optim/test_muon_"
DOCUMENTED = "test/distributed/optim/test_muon.py::"
LAYOUTS = f"{HERE}layouts.py::TestMuonDTensorLayouts::test_"
EXCHANGE = f"{HERE}exchange.py::TestMuonExchange::test_"
ORDER = f"{HERE}exchange.py::TestMuonOrder::test_"
GROUPS = f"{HERE}groups.py::TestMuonGroups::test_"
FUNCTIONS = f"{HERE}functions.py::TestMuonFunctions::test_"
FSDP1 = f"{HERE}fsdp1.py::TestMuonFSDP1::test_"
ERRORS = f"{HERE}errors.py::TestMuonMistakes::test_"
PARTIAL = f"{HERE}layouts.py::TestMuonPartial::test_"
MEETING = f"{HERE}process_groups.py::TestMuonSpanningGroups::test_"
REPLACED = f"{HERE}replaced.py::TestMuonReplacedOnFour::test_"
SCHEDULE = f"{HERE}schedule.py::TestMuonSchedule::test_"
REGRESSIONS = f"{HERE}regressions.py::TestMuonRegressions::test_"
RELAYS = f"{HERE}relays.py::TestMuonRelays::test_"
FORMS = f"{HERE}forms.py::TestMuonForms::test_"
DIVIDED = f"{HERE}forms.py::TestMuonDivided::test_"
FAULTY = f"{HERE}faults.py::"
ENGINE = "_muon_engine/engine.py"
EXCHANGED = "_muon_engine/layouts/exchange.py"
MEETINGS = "_muon_engine/process_groups.py"
OWNERS = "_muon_engine/schedule/owners.py"
BUCKETS = "_muon_engine/schedule/buckets.py"
PACKS = "_muon_engine/schedule/packs.py"
LIVE = "_muon_engine/runtime/__init__.py"
PIPELINE = "_muon_engine/runtime/pipeline.py"
STATUSES = "_muon_engine/runtime/statuses.py"
TRANSPORT = "_muon_engine/runtime/transport.py"
PARTITION = "test/optim/test_muon_partition.py::TestPartition::test_"
CONFIG = "test/optim/test_muon_config.py::TestDistributedConfig::test_"
GRAM = "test/optim/test_muon.py::TestGramNewtonSchulz::test_"

FAULTS = (
    # Owners
    Fault(
        "two owners are swapped on one rank, after all have agreed",
        ENGINE,
        """            layouts,
            owners,
            NS_DTYPE,""",
        """            layouts,
            [{0: 1, 1: 0}.get(o, o) if self.rank == 1 else o for o in owners],
            NS_DTYPE,""",
        (f"{ERRORS}nothing_changes_before_an_error_and_all_works_after_it",),
    ),
    Fault(
        "of equally busy ranks, each takes itself for the owner",
        OWNERS,
        "        at = (int(bytes_.roll(-start).argmin()) + start) % len(teams)\n",
        """        from torch.optim._muon_engine.layouts import process_rank

        at, me = int(bytes_.argmin()), self.group.index(process_rank())
        at = me if bytes_[me] == bytes_[at] else at
""",
        (f"{LAYOUTS}assignments_are_one_owner_each_and_equal_on_all_ranks",),
    ),
    Fault(
        "every optimizer's owners start with the first rank",
        OWNERS,
        "        at = (int(bytes_.roll(-start).argmin()) + start) % len(teams)\n",
        "        at = int(bytes_.argmin())\n",
        ("test/optim/test_muon_engine.py::TestOwners::test_ties",),
    ),
    Fault(
        "owners are of the first replica only",
        OWNERS,
        "            owners[i : i + len(blocks)] = loads.give(flops[i], found)\n",
        """            (owner,) = loads.give(flops[i], found)
            owners[i] = layouts[i].shards.replicas_of(owner)[0]
""",
        (f"{EXCHANGE}hsdp_orthogonalizes_once_and_not_per_replica",),
    ),
    Fault(
        "DDP replicas orthogonalize each for itself",
        "_muon_engine/layouts/groups.py",
        'if kind != "ep" and group is not None',
        'if kind not in ("ddp", "ep") and group is not None',
        (f"{GROUPS}ddp_vs_single_device",),
    ),
    Fault(
        "matrices go into buckets without a look at their work",
        BUCKETS,
        "                at = max(fitting, key=room.__getitem__)\n",
        "                at = fitting[0]\n",
        (f"{SCHEDULE}a_round_gives_owners_equal_work",),
    ),
    Fault(
        "the bound of a bucket counts elements and not bytes",
        BUCKETS,
        "        limit = BUCKET_BYTES // dtype.itemsize\n",
        "        limit = BUCKET_BYTES\n",
        (f"{SCHEDULE}buckets_are_bounded_in_bytes",),
    ),
    # The data of an exchange
    Fault(
        "the result is sent to the ranks that were asked for shards, and to no other replica",
        PACKS,
        "scatter_send=self._pack(as_owner, scatter, receives),",
        "scatter_send=self._pack(as_owner, scatter, self.is_source),",
        (f"{DOCUMENTED}TestMuonDTensor::test_dtensor_placements",),
    ),
    Fault(
        "only the first region of a shard is packed",
        PIPELINE,
        "for _, region, view in bucket.gather_send.of(matrix.number)\n",
        "for _, region, view in bucket.gather_send.of(matrix.number)[:1]\n",
        (f"{FSDP1}strategies_and_units",),
    ),
    Fault(
        "only the first region of the result is packed",
        TRANSPORT,
        "        yield from self.scatter_send.of(matrix)\n",
        "        yield from self.scatter_send.of(matrix)[:1]\n",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "shards travel in their own dtype instead of bfloat16",
        BUCKETS,
        "dtype = layout.dtype if layout.shards.partial else wire_dtype",
        "dtype = layout.dtype",
        (f"{EXCHANGE}bytes_sent_are_what_the_placements_need",),
    ),
    Fault(
        "the owner orthogonalizes its own shard, with zeros for the others'",
        PIPELINE,
        "[(region.of_matrix(out), view) for _, region, view in packed]",
        "[(region.of_matrix(out), view * 0) for _, region, view in packed]",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "the momentum is sent without the look-ahead of nesterov",
        PIPELINE,
        "grads = [region.of_local(m.param.lookahead) for m, region in regions]",
        "grads = momenta",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "contributions to a sum are taken for replicas, so that one is sent",
        "_muon_engine/layouts/__init__.py",
        "        contributions = self.contributions or itertools.repeat(0)\n",
        "        contributions = itertools.repeat(0)\n",
        (f"{PARTIAL}partial_parameters",),
    ),
    Fault(
        "contributions to a sum are added as they come",
        PIPELINE,
        "in sorted(contributions, key=lambda part: part[0]):",
        "in contributions:",
        (f"{PARTIAL}contributions_are_added_in_the_order_of_the_group",),
    ),
    # The order of a step
    Fault(
        "prefetch_count is ignored",
        ENGINE,
        "return bool(config.async_gpu_parallelism), config.prefetch_count",
        "return bool(config.async_gpu_parallelism), 0",
        (f"{ORDER}prefetch_count_is_the_number_of_gathers_in_flight",),
    ),
    Fault(
        "async_gpu_parallelism is ignored",
        ENGINE,
        "return bool(config.async_gpu_parallelism), config.prefetch_count",
        "return True, config.prefetch_count",
        (f"{ORDER}without_async_gpu_parallelism_owners_take_turns",),
    ),
    Fault(
        "flags that change after construction go unnoticed",
        ENGINE,
        "        if _flags_of(self.config) != self.flags:\n",
        "        if not self.flags:\n",
        (f"{ERRORS}errors_that_sent_nothing_are_forgotten",),
    ),
    Fault(
        "a group has one slot too few",
        PACKS,
        "count = min(len(packs), slots)",
        "count = min(len(packs), slots - 1)",
        (f"{EXCHANGE}memory_stays_within_the_buckets_in_flight",),
    ),
    Fault(
        "a group has one slot too many",
        PACKS,
        "count = min(len(packs), slots)",
        "count = min(len(packs), slots + 1)",
        (f"{EXCHANGE}memory_stays_within_the_buckets_in_flight",),
    ),
    Fault(
        "the next gather takes a slot before its updates are applied",
        PIPELINE,
        (
            "        if one_at_a_time:\n"
            "            _exhaust(task)\n"
            "        elif k > 0:\n"
            "            next(tasks[k - 1], None)\n"
            "        # Its slot was that of bucket k-1, whose results are applied now.\n"
            "        if k + ahead < len(tasks):\n"
            "            next(tasks[k + ahead])\n"
        ),
        (
            "        if k + ahead < len(tasks):\n"
            "            next(tasks[k + ahead])\n"
            "        if one_at_a_time:\n"
            "            _exhaust(task)\n"
            "        elif k > 0:\n"
            "            next(tasks[k - 1], None)\n"
        ),
        (f"{LAYOUTS}prefetch_and_async_change_nothing",),
    ),
    Fault(
        "prefetch counts a rank's own buckets instead of each group's",
        PIPELINE,
        "    for task in tasks[:ahead]:\n        next(task)\n    yield\n",
        "    for task in tasks[: ahead if len(tasks) > 1 else 0]:\n        next(task)\n    yield\n",
        (f"{LAYOUTS}second_group_on_half_of_the_ranks",),
    ),
    Fault(
        "a rank that has nothing to send leaves the collective out",
        TRANSPORT,
        '            self.launch(f"{phase} of bucket {self.bucket.index}", start, *memory)\n',
        (
            "            if send.flat.numel():\n"
            '                self.launch(f"{phase} of bucket {self.bucket.index}", start, *memory)\n'
        ),
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "a rank without gradients for a bucket leaves the gather out",
        PIPELINE,
        "            bucket.start_gather()\n",
        """            if any(matrix.param.has_grad for matrix in bucket.matrices):
                bucket.start_gather()
""",
        (f"{EXCHANGE}gradients_do_not_change_the_calls",),
    ),
    Fault(
        "ranks of a group are numbered within it",
        MEETINGS,
        "        if tuple(dist.get_process_group_ranks(group)) == ranks:\n",
        "        if tuple(range(dist.get_world_size(group))) == ranks:\n",
        (f"{HERE}process_groups.py::TestMuonSpanningGroups::test_spanning_groups",),
    ),
    Fault(
        "a step that breaks off leaves its collectives in flight",
        PIPELINE,
        "                flight.wait()\n",
        "                pass\n",
        (f"{EXCHANGE}error_in_the_middle_of_a_step_leaves_nothing_in_flight",),
    ),
    # Gradients and momentum
    Fault(
        "a rank without a gradient says that its shard is empty",
        LIVE,
        "else Status.ABSENT",
        "else Status.EMPTY",
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_before_anything_moves",),
    ),
    Fault(
        "a rank whose shard is empty says that it has no gradient",
        LIVE,
        "            return Status.EMPTY\n",
        "            return Status.ABSENT\n",
        (f"{EXCHANGE}gradient_of_an_empty_shard_does_not_matter",),
    ),
    Fault(
        "a rank keeps a gradient that it cannot use to itself",
        LIVE,
        "            return Status.UNUSABLE\n",
        "            return Status.EMPTY\n",
        (f"{RELAYS}gradient_that_one_replica_cannot_use",),
    ),
    Fault(
        "a rank applies what comes back, whatever its own status",
        PIPELINE,
        "if matrix.owner != self.rank and matrix.applies:\n",
        "if matrix.owner != self.rank:\n",
        (f"{EXCHANGE}no_gradient_on_any_rank_is_skipped",),
    ),
    Fault(
        "ranks learn what all statuses have in common",
        STATUSES,
        '"op": dist.ReduceOp.MAX',
        '"op": dist.ReduceOp.MIN',
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_before_anything_moves",),
    ),
    Fault(
        "some present and some absent is no mismatch",
        STATUSES,
        "    (lambda p, a, u, *_: p and a, _SOME_ABSENT),\n",
        "",
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_before_anything_moves",),
    ),
    Fault(
        "hyperparameters that differ are no mismatch",
        STATUSES,
        "o + minus_o, _OTHER_OPTIONS",
        "0, _OTHER_OPTIONS",
        (f"{ERRORS}hyperparameter_of_one_rank_in_the_first_step_name_lr",),
    ),
    Fault(
        "the digest of the hyperparameters lacks eps",
        "_muon.py",
        "            float(self.eps),\n",
        "",
        (f"{ERRORS}hyperparameter_of_one_rank_in_the_first_step_name_eps",),
    ),
    Fault(
        "matrices of different eps share a batch",
        "_muon.py",
        "how = self.ns_steps, self.eps, self.ns_algorithm\n        return (coeff",
        "how = self.ns_steps, self.ns_algorithm\n        return (coeff",
        (f"{CONFIG}foreach_keeps_groups_of_different_eps_apart",),
    ),
    Fault(
        "the engine keeps the gradients of a step",
        LIVE,
        "        self.given = self.grad = None\n",
        "        pass\n",
        (f"{REGRESSIONS}gradients_are_freed",),
    ),
    Fault(
        "values that differ are no mismatch",
        STATUSES,
        "v + minus_v, _OTHER_VALUES",
        "0, _OTHER_VALUES",
        (f"{ERRORS}values_are_compared_when_they_first_move",),
    ),
    Fault(
        "steps are not counted",
        ENGINE,
        "        self.steps += 1\n",
        "        self.steps = 1\n",
        (f"{EXCHANGE}ranks_that_are_not_in_the_same_step",),
    ),
    Fault(
        "the header of the statuses has no step number",
        STATUSES,
        "if step + minus_step == identity + minus_identity == 0:",
        "if identity + minus_identity == 0:",
        (f"{EXCHANGE}ranks_that_are_not_in_the_same_step",),
    ),
    Fault(
        "the header of the statuses does not tell optimizers apart",
        STATUSES,
        "if step + minus_step == identity + minus_identity == 0:",
        "if step + minus_step == 0:",
        (f"{ERRORS}optimizers_stepped_in_different_orders",),
    ),
    Fault(
        "the header is read after the last bucket only",
        STATUSES,
        "        text = self._other_step(header)\n        if self",
        '        text = ""\n        if self',
        (f"{ERRORS}optimizers_stepped_in_different_orders",),
    ),
    Fault(
        "the momentum of a flat parameter is updated once for each matrix in it",
        LIVE,
        "        if self._accumulated or self.given is None or self.problem:\n",
        "        if self.given is None or self.problem:\n",
        (f"{FSDP1}strategies_and_units",),
    ),
    Fault(
        "momentum is kept where there is a gradient, and nowhere else",
        LIVE,
        '        state["momentum_buffer"] = buffer\n',
        """        if grad is not None:
            state["momentum_buffer"] = buffer
""",
        (f"{REGRESSIONS}checkpoint_after_a_step_of_the_experts_only",),
    ),
    Fault(
        "momentum is a plain tensor where the parameter is a DTensor",
        "_muon_engine/layouts/dtensor.py",
        "    return like_param(param, torch.zeros_like(local_part(param)))\n",
        "    return torch.zeros_like(local_part(param))\n",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    # The update
    Fault(
        "the learning rate is scaled by the shape of the shard",
        PIPELINE,
        "formulas.apply(local, updates, matrix.layout.whole)",
        "formulas.apply(local, updates, tuple(local[0].shape))",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "weights decay on the owner only",
        PIPELINE,
        "            formulas.apply(local, updates, matrix.layout.whole)\n",
        (
            "            if matrix.owner != self.rank:\n"
            "                formulas = formulas._replace(weight_decay=0.0)\n"
            "            formulas.apply(local, updates, matrix.layout.whole)\n"
        ),
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "the caller's autocast reaches the iteration",
        ENGINE,
        "    return torch.autocast(kind, enabled=False)\n",
        "    return torch.autocast(kind, enabled=torch.is_autocast_enabled(kind))\n",
        (f"{LAYOUTS}autocast_does_not_reach_the_iteration",),
    ),
    Fault(
        "autograd is not told what a step has written",
        ENGINE,
        '                    count_version(param.tensor, states[param.tensor]["momentum_buffer"])\n',
        "                    pass\n",
        (f"{LAYOUTS}version_counters_show_what_a_step_writes",),
    ),
    # Layouts
    Fault(
        "TP is taken to have cut what FSDP left",
        EXCHANGED,
        'KINDS = ("fsdp", "tp", "ddp", "cp")',
        'KINDS = ("tp", "fsdp", "ddp", "cp")',
        (f"{FUNCTIONS}gather_then_redistribute_over_process_groups",),
    ),
    Fault(
        "what ranks learned over one group does not reach the next one",
        EXCHANGED,
        "        told: Told = parts, digests, ep_ranks\n",
        "        told: Told = _by_name(layouts), digests, ep_ranks\n",
        (f"{GROUPS}combinations_vs_single_device",),
    ),
    Fault(
        "shards that leave a gap go on",
        "_muon_engine/layouts/__init__.py",
        "    if found != layout.numel or not inside:\n",
        "    if found > layout.numel or not inside:\n",
        ("test/optim/test_muon_engine.py::TestCover::test_no_tilings",),
    ),
    Fault(
        "expert ids are not looked at, so that other experts are replicas",
        "_muon_engine/layouts/groups.py",
        "key = Key(index, 0, name, self.groups.expert(index))",
        "key = Key(index, 0, name)",
        (f"{HERE}groups.py::TestMuonExperts::test_ddp_over_all_ranks",),
    ),
    Fault(
        "FSDP1's last element is taken for the one after it",
        "_muon_engine/layouts/fsdp1.py",
        "info.intra_param_start_idx, info.intra_param_end_idx + 1",
        "info.intra_param_start_idx, info.intra_param_end_idx",
        (f"{FSDP1}strategies_and_units",),
    ),
    Fault(
        "an FSDP1 shard is read as if it began with a row",
        "_muon_engine/layouts/fsdp1.py",
        "offset + at - start, width)",
        "offset + (at - start) // columns * columns, width)",
        (f"{FSDP1}strategies_and_units",),
    ),
    # Agreement
    Fault(
        "an error of one rank is raised before the others know",
        ENGINE,
        "            error = error or found\n        if self.reader is None:\n",
        "            raise\n        if self.reader is None:\n",
        (f"{ERRORS}one_rank_with_a_bad_assign_fn",),
    ),
    Fault(
        "a rank raises before it has gone through all its groups",
        ENGINE,
        (
            "            error = error or found\n"
            "        if error is not None:\n"
            "            raise error\n"
        ),
        (
            "            error = error or found\n"
            "            if error is not None:\n"
            "                raise error\n"
        ),
        (f"{ERRORS}disagreement_in_one_group_reaches_those_who_share_another",),
    ),
    Fault(
        "what ranks know is not compared at construction",
        "_muon_engine/agreement.py",
        "exchange(group, (digest, number), error, descriptions)",
        'exchange(group, ("", number), error, descriptions)',
        (f"{ERRORS}different_hyperparameters",),
    ),
    Fault(
        "flags are not compared at construction",
        ENGINE,
        '        "prefetch_count": str(flags[1]),\n',
        "",
        (f"{ERRORS}different_flags_of_the_config",),
    ),
    Fault(
        "a rank that did not build its Muon leaves no note",
        ENGINE,
        "                    self._notes(step).leave(found)\n",
        "                    pass\n",
        (f"{ERRORS}error_at_an_end_of_a_chain_of_groups",),
    ),
    # Parameters that change
    Fault(
        "changed parameters are not noticed",
        ENGINE,
        "        return len(tensors) == len(self.params) and all(\n",
        "        return bool(tensors) or all(\n",
        (f"{REPLACED}shards_become_replicas_steps_1",),
    ),
    Fault(
        "a parameter that takes another's place begins without momentum",
        ENGINE,
        "            take_momentum(former.params, params, states, self.rank == 0)\n",
        "            pass\n",
        (f"{REPLACED}equal_placements_named_True",),
    ),
    Fault(
        "another layer of equal shape inherits the momentum",
        ENGINE,
        "same = names[0] == names[1] and (names[0] or a.origin[1:] != b.origin[1:])",
        "same = names[0] == names[1]",
        (f"{REPLACED}blocks_that_take_turns",),
    ),
    Fault(
        "state_dict moves the momentum itself",
        "_muon.py",
        "            self.state = state\n",
        "            pass\n",
        (f"{REPLACED}saved_while_others_are_in_place",),
    ),
    Fault(
        "ranks that should meet do not wait for each other",
        MEETINGS,
        "    if len(ranks) == 1 or dist.group.WORLD is None",
        "    if ranks or dist.group.WORLD is None",
        (f"{MEETING}rendezvous_names_the_ranks_that_do_not_come",),
    ),
    Fault(
        "a rank that waited in vain is taken for one that came the next time",
        MEETINGS,
        '        store.delete_key(f"{key}/{me}")\n        store.add(key, -1)\n',
        "",
        (f"{MEETING}rendezvous_names_the_ranks_that_do_not_come",),
    ),
    # Failures
    Fault(
        "an error of an exchange names no matrix",
        TRANSPORT,
        "        carried = listed([matrix.layout.describe() for matrix in matrices])\n",
        '        carried = "matrices"\n',
        (f"{FAULTY}TestMuonKilled::test_killed",),
    ),
    Fault(
        "a rank that fails does not say why",
        ENGINE,
        "                self._notes(step).leave(failure)\n",
        "                pass\n",
        (f"{FAULTY}TestMuonRaises::test_raises",),
    ),
    Fault(
        "another optimizer's failure is taken for this one's",
        MEETINGS,
        '{_short(ranks)}/{number}/{step}"',
        '{_short(ranks)}/{step}"',
        (f"{ERRORS}failure_of_another_optimizer_over_the_same_ranks",),
    ),
    Fault(
        "a broken group serves again beside new ones",
        MEETINGS,
        "    key = ranks, backend, tuple(sorted(group.group_name for group in known))\n",
        "    key = ranks, backend\n",
        (f"{HERE}process_groups.py::TestMuonSpanningGroups::test_spanning_groups",),
    ),
    # Many replicas, many ranks
    Fault(
        "a source does not relay what it computed itself",
        "_muon_engine/runtime/relays.py",
        "origins = (self.bucket.scatter_recv, self.bucket.kept)",
        "origins = (self.bucket.scatter_recv,)",
        (f"{RELAYS}any_placement",),
    ),
    Fault(
        "the memory of two relays is one",
        "_muon_engine/runtime/relays.py",
        "itertools.cycle(incoming)",
        "itertools.cycle(incoming[:1])",
        (f"{RELAYS}any_placement",),
    ),
    Fault(
        "updates for replicas are written where matrices were gathered",
        PACKS,
        "        return self.gather_recv == self.scatter_send\n",
        "        return True\n",
        (f"{DOCUMENTED}TestMuonDTensor::test_dtensor_placements",),
    ),
    Fault(
        "a rank passes on what it got in the order in which it came",
        TRANSPORT,
        "[c for at in range(nodes) for c in rows[at::nodes]]",
        "list(rows)",
        (f"{RELAYS}process_groups",),
    ),
    Fault(
        "ranks of one node take each other's rail",
        PACKS,
        "            self.group[at :: self.node_size],\n",
        "            self.group[self.node_size - 1 - at :: self.node_size],\n",
        (f"{RELAYS}process_groups",),
    ),
    # Newton-Schulz
    Fault(
        "all steps follow the first Gram matrix",
        "_newton_schulz.py",
        "        if growth > _GRAM_GROWTH:\n",
        "        if growth == math.inf:\n",
        (f"{GRAM}distance_from_the_exact_polynomial",),
    ),
    # Parts and blocks
    Fault(
        "a part begins where the fused weight's first row is stored",
        "_muon_engine/layouts/divide.py",
        "offset = block * apart + inside * (region.stride if dim == 0 else 1)",
        "offset = block * apart",
        (f"{FORMS}any_placement",),
    ),
    Fault(
        "the learning rate of a divided matrix goes by its block",
        PIPELINE,
        "formulas.apply(local, updates, matrix.layout.whole)",
        "formulas.apply(local, updates, matrix.layout.shape)",
        (f"{DIVIDED}placements",),
    ),
    Fault(
        "each owner has the Gram matrix of its own block",
        "_muon_engine/runtime/shared.py",
        "        dist.all_reduce(total, group=self._group)\n        return total.to(x.dtype)\n",
        "        return total.to(x.dtype)\n",
        (f"{DIVIDED}placements",),
    ),
    Fault(
        "an owner without a gradient leaves the other owners alone",
        "_muon_engine/runtime/__init__.py",
        "return self.applies or self.products is not None",
        "return self.applies",
        (f"{DIVIDED}missing_gradients",),
    ),
    # Which parameters are for Muon
    Fault(
        "layers with the vocabulary's size are heads, though other layers take this size",
        "_muon_partition.py",
        "        sizes -= {size for p in layers for size in p.shape[1:]}\n",
        "",
        (f"{PARTITION}vocabulary_is_an_output_head",),
    ),
    Fault(
        "an adapter whose rank is the number of experts makes its layer a router",
        "_muon_partition.py",
        ' if p.unit != p.layer or ".base_layer." in p.name]',
        "]",
        (f"{PARTITION}routers",),
    ),
)
