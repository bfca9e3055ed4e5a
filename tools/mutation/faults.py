"""The faults: of the kind that leaves most steps running, each with the tests that should notice."""

from __future__ import annotations

from .fault import Fault


HERE = "test/distributed/optim/test_muon_"
LAYOUTS = f"{HERE}layouts.py::TestMuonDTensorLayouts::test_"
EXCHANGE = f"{HERE}exchange.py::TestMuonExchange::test_"
GROUPS = f"{HERE}groups.py::TestMuonGroups::test_"
FSDP1 = f"{HERE}fsdp1.py::TestMuonFSDP::test_"
ERRORS = f"{HERE}errors.py::TestMuonAgreement::test_"
MODULES = f"{HERE}group_modules.py::TestMuonGroupErrors::test_"
PARTIAL = f"{HERE}partial.py::TestMuonPartial::test_"
STATE = f"{HERE}state.py::TestMuonState::test_"
MEETING = f"{HERE}process_groups.py::TestMuonSpanningGroups::test_"
SCHEDULE = f"{HERE}schedule.py::TestMuonSchedule::test_"
RELAYS = f"{HERE}relays.py::TestMuonRelays::test_"
FAULTY = f"{HERE}faults.py::"
GRAM = "test/optim/test_muon.py::TestGramNewtonSchulz::test_"

FAULTS = (
    # Who owns what
    Fault(
        "two owners are swapped on one rank, after all have agreed",
        "_muon_engine/engine.py",
        "            [owner for _, owner in trained],\n",
        """            [
                {0: 1, 1: 0}.get(owner, owner) if self.rank == 1 else owner
                for _, owner in trained
            ],
""",
        (f"{ERRORS}nothing_changes_before_an_error_and_all_works_after_it",),
    ),
    Fault(
        "of equally busy ranks, each takes itself for the owner",
        "_muon_engine/schedule/owners.py",
        "        place = int((received - held).masked_fill(busier, _NEVER).argmin())\n",
        """        from torch.optim._muon_engine.layouts import process_rank

        found = (received - held).masked_fill(busier, _NEVER)
        place, me = int(found.argmin()), self.group.index(process_rank())
        place = me if found[me] == found[place] else place
""",
        (f"{LAYOUTS}assignments_are_one_owner_each_and_equal_on_all_ranks",),
    ),
    Fault(
        "owners are of the first replica only",
        "_muon_engine/schedule/owners.py",
        "            owners[i] = loads.give(flops[i], layouts[i].numel, held[id(shards)])\n",
        """            owner = loads.give(flops[i], layouts[i].numel, held[id(shards)])
            owners[i] = shards.replicas_of(owner)[0]
""",
        (f"{EXCHANGE}hsdp_orthogonalizes_once_and_not_per_replica",),
    ),
    Fault(
        "DDP replicas orthogonalize each for itself",
        "_muon_engine/layouts/groups.py",
        'kinds: tuple[str, ...] = ("fsdp", "tp", "ddp", "cp")',
        'kinds: tuple[str, ...] = ("fsdp", "tp", "cp")',
        (f"{GROUPS}each_matrix_is_orthogonalized_once",),
    ),
    Fault(
        "matrices go into buckets without a look at their work",
        "_muon_engine/schedule/buckets.py",
        "heapreplace(room, (left + work[m], at))",
        "heapreplace(room, (left, at))",
        (f"{SCHEDULE}a_round_gives_owners_equal_work",),
    ),
    # What travels
    Fault(
        "the result is sent to the ranks that were asked for shards, and to no other replica",
        "_muon_engine/schedule/specs.py",
        "self._pack_spec(as_owner, scatter, self.receives, says)",
        "self._pack_spec(as_owner, scatter, self.is_source, says)",
        (f"{LAYOUTS}parity_on_every_placement_of_a_2d_mesh",),
    ),
    Fault(
        "only the first region of a shard is packed",
        "_muon_engine/runtime/pipeline.py",
        "found = bucket.gather_send.regions(matrix.number)",
        "found = bucket.gather_send.regions(matrix.number)[:1]",
        (f"{FSDP1}flags",),
    ),
    Fault(
        "only the first region of the result is packed",
        "_muon_engine/runtime/buffers.py",
        "sent = [*self.scatter_send.regions(matrix), ",
        "sent = [*self.scatter_send.regions(matrix)[:1], ",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "shards travel in their own dtype instead of bfloat16",
        "_muon_engine/schedule/buckets.py",
        "gather_dtype = layout.dtype if layout.shards.partial else wire_dtype",
        "gather_dtype = layout.dtype",
        (f"{EXCHANGE}bytes_of_wide_parameters_travel_rounded",),
    ),
    Fault(
        "the owner orthogonalizes its own shard, with zeros for the others'",
        "_muon_engine/runtime/buffers.py",
        "return [(region.of_matrix(out), view) for _, region, view in found]",
        "return [(region.of_matrix(out), view * 0) for _, region, view in found]",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "the momentum is sent without the look-ahead of nesterov",
        "_muon_engine/runtime/pipeline.py",
        "        if self.param.grad is None:\n            return momentum\n",
        "        if self.param.grad is not None:\n            return momentum\n",
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
        "_muon_engine/runtime/buffers.py",
        "in sorted(parts, key=lambda part: part[0]):",
        "in parts:",
        (f"{PARTIAL}contributions_are_added_in_the_order_of_the_group",),
    ),
    # When it travels
    Fault(
        "a group has one slot too few",
        "_muon_engine/schedule/specs.py",
        "count = min(len(specs), slots)",
        "count = min(len(specs), slots - 1)",
        (f"{LAYOUTS}parity_on_a_mesh_of_four",),
    ),
    Fault(
        "the next gather takes a slot before its updates are applied",
        "_muon_engine/runtime/pipeline.py",
        """            if finished is not None:
                self.finish(finished)
            if bucket.follower is not None:
                self.gather(bucket.follower)
""",
        """            if bucket.follower is not None:
                self.gather(bucket.follower)
            if finished is not None:
                self.finish(finished)
""",
        (f"{LAYOUTS}prefetch_and_async_change_nothing",),
    ),
    Fault(
        "prefetch counts a rank's own buckets instead of each group's",
        "_muon_engine/runtime/pipeline.py",
        """            if bucket.bucket.index <= self.buffers.prefetch_count:
                self.gather(bucket)
""",
        """            if buckets.index(bucket) <= self.buffers.prefetch_count:
                self.gather(bucket)
""",
        (f"{LAYOUTS}second_group_on_half_of_the_ranks",),
    ),
    Fault(
        "a rank that has nothing to send leaves the collective out",
        "_muon_engine/runtime/buffers.py",
        "        if self.group is None:\n            return\n",
        "        if self.group is None or not send.flat.numel():\n            return\n",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "a rank without gradients for a bucket leaves the gather out",
        "_muon_engine/runtime/pipeline.py",
        "        bucket.start_gather()\n",
        """        if any(matrix.param.has_grad for matrix in matrices):
            bucket.start_gather()
""",
        (f"{EXCHANGE}all_ranks_make_the_same_calls_with_and_without_gradients",),
    ),
    Fault(
        "ranks of a group are numbered within it",
        "_muon_engine/runtime/buffers.py",
        "tuple(dist.get_process_group_ranks(group))",
        "tuple(range(dist.get_world_size(group)))",
        (f"{LAYOUTS}several_meshes_in_one_optimizer",),
    ),
    Fault(
        "a step that breaks off leaves its collectives in flight",
        "_muon_engine/runtime/pipeline.py",
        "            self._drain()\n            raise\n",
        "            raise\n",
        (f"{EXCHANGE}error_in_the_middle_of_a_step_leaves_nothing_in_flight",),
    ),
    # Gradients and momentum
    Fault(
        "a rank without a gradient says that its shard is empty",
        "_muon_engine/runtime/pipeline.py",
        "return GradStatus.PRESENT if self.has_grad else GradStatus.ABSENT",
        "return GradStatus.PRESENT if self.has_grad else GradStatus.EMPTY",
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_on_every_holder",),
    ),
    Fault(
        "a rank whose shard is empty says that it has no gradient",
        "_muon_engine/runtime/pipeline.py",
        "            return GradStatus.EMPTY\n",
        "            return GradStatus.ABSENT\n",
        (f"{EXCHANGE}empty_shard_needs_no_gradient",),
    ),
    Fault(
        "a rank applies what comes back, whatever its own status",
        "_muon_engine/runtime/pipeline.py",
        """            if not matrix.status.applies:
                continue
            matrix.log("apply")
""",
        """            matrix.log("apply")
""",
        (f"{EXCHANGE}no_gradient_on_any_rank_is_skipped",),
    ),
    Fault(
        "a summary says what all statuses have in common",
        "_muon_engine/runtime/grad_status.py",
        "said[rows] = torch.maximum(said[rows], theirs)",
        "said[rows] = torch.minimum(said[rows], theirs)",
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_on_every_holder",),
    ),
    Fault(
        "the owner keeps its summary to itself",
        "_muon_engine/runtime/grad_status.py",
        "buffer.write_flags(summary + _TAG * self._tag(bucket, back=True))",
        "buffer.write_flags(0 * summary + _TAG * self._tag(bucket, back=True))",
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_on_every_holder",),
    ),
    Fault(
        "steps are not counted, so that their buckets are not told apart",
        "_muon_engine/engine.py",
        "        self._steps += 1\n",
        "        self._steps = 1\n",
        (f"{EXCHANGE}ranks_that_are_not_in_the_same_step",),
    ),
    Fault(
        "tags are equal in all steps and buckets",
        "_muon_engine/runtime/grad_status.py",
        "return (5 * self._step + bucket + 7 * back) % _TAGS",
        "return 7 * back",
        (f"{EXCHANGE}ranks_that_are_not_in_the_same_step",),
    ),
    Fault(
        "the momentum of a flat parameter is updated once for each matrix in it",
        "_muon_engine/runtime/pipeline.py",
        "        if self._accumulated or grad is None or self.unusable:\n",
        "        if grad is None or self.unusable:\n",
        (f"{FSDP1}flags",),
    ),
    Fault(
        "momentum is kept where there is a gradient, and nowhere else",
        "_muon_engine/engine.py",
        '            state["momentum_buffer"] = buffer\n            problem = ""\n',
        """            if param.grad is not None:
                state["momentum_buffer"] = buffer
            problem = ""
""",
        (f"{STATE}momentum_is_there_after_the_first_step_whatever_has_a_gradient",),
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
        "_muon_engine/runtime/pipeline.py",
        "            shape = matrix.layout.shape\n",
        "            shape = tuple(local.shape)\n",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "weights decay on the owner only",
        "_muon_engine/runtime/pipeline.py",
        "                how.apply([local], None if update is None else [update], shape)\n",
        """                if matrix.owner != self.rank:
                    how = how._replace(weight_decay=0.0)
                how.apply([local], None if update is None else [update], shape)
""",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "the caller's autocast reaches the iteration",
        "_muon_engine/engine.py",
        "    return torch.autocast(device.type, enabled=False)\n",
        "    return nullcontext()\n",
        (f"{LAYOUTS}autocast_does_not_reach_the_iteration",),
    ),
    Fault(
        "autograd is not told what a step has written",
        "_muon_engine/engine.py",
        "        torch.autograd.graph.increment_version(written)\n",
        "        del written\n",
        (f"{LAYOUTS}version_counters_show_what_a_step_writes",),
    ),
    # Who holds what
    Fault(
        "TP is taken to have cut what FSDP left",
        "_muon_engine/layouts/merge.py",
        'KINDS = ("fsdp", "tp", "ddp", "cp")',
        'KINDS = ("tp", "fsdp", "ddp", "cp")',
        (f"{GROUPS}tp_cuts_first_and_fsdp_the_rows_of_its_piece",),
    ),
    Fault(
        "expert ids are not looked at, so that other experts are replicas",
        "_muon_engine/layouts/groups.py",
        "Key(index, 0, name, self.groups.experts.get(index))",
        "Key(index, 0, name)",
        (f"{HERE}experts.py::TestMuonExpertParallel::test_ddp_over_all_ranks",),
    ),
    Fault(
        "FSDP1's last element is taken for the one after it",
        "_muon_engine/layouts/fsdp1.py",
        "info.intra_param_start_idx, info.intra_param_end_idx + 1",
        "info.intra_param_start_idx, info.intra_param_end_idx",
        (f"{FSDP1}flags",),
    ),
    Fault(
        "an FSDP1 shard is read as if it began with a row",
        "_muon_engine/layouts/fsdp1.py",
        "offset + at - start, width)",
        "offset + (at - start) // columns * columns, width)",
        (f"{FSDP1}flags",),
    ),
    # Agreement
    Fault(
        "an error of one rank is raised before the others know",
        "_muon_engine/engine.py",
        "            error = found\n        if self.functions is not None:\n",
        """            error = found
        if error is not None:
            raise error
        if self.functions is not None:
""",
        (f"{ERRORS}one_rank_with_a_bad_assign_fn",),
    ),
    Fault(
        "what ranks know is not compared at construction",
        "_muon_engine/agreement.py",
        "exchange(group, (digest, alone, unsettled), error, shared)",
        'exchange(group, ("", alone, unsettled), error, shared)',
        (f"{ERRORS}different_hyperparameters",),
    ),
    Fault(
        "what a rank found goes through its groups once, and not back",
        "_muon_engine/agreement.py",
        "    return [*groups, *back, *groups, *back, *groups]\n",
        "    return list(groups)\n",
        (f"{ERRORS}error_at_an_end_of_a_chain_of_groups",),
    ),
    Fault(
        "holders that came to different layouts by process groups go on",
        "_muon_engine/layouts/merge.py",
        "if digest != ours:",
        "if False:",
        (f"{MODULES}replicate_group_on_some_ranks_only",),
    ),
    Fault(
        "what a rank knows goes forth and back once",
        "_muon_engine/agreement.py",
        "    return [*groups, *back, *groups, *back, *groups]\n",
        "    return [*groups, *back]\n",
        (f"{ERRORS}flags_that_ranks_at_an_end_of_a_winding_path_changed_otherwise",),
    ),
    Fault(
        "nobody says that others are still to be asked about flags",
        "_muon_engine/engine.py",
        "        told = agree(shared, error, unsettled)\n",
        "        told = agree(shared, error)\n",
        (f"{ERRORS}flags_that_some_groups_only_have_to_ask_about",),
    ),
    Fault(
        "state_dict moves the momentum itself",
        "_muon.py",
        "        self.state = defaultdict(dict, {p: dict(state) for p, state in own.items()})\n",
        "        self.state = own\n",
        (
            f"{HERE}replaced.py::TestMuonReplacedOnTwo::"
            "test_saved_while_others_are_in_place",
        ),
    ),
    # Parameters that change
    Fault(
        "changed parameters are not noticed",
        "_muon_engine/engine.py",
        "        return len(params) == len(self.params) and all(\n",
        "        return bool(params) or all(\n",
        (f"{HERE}replaced.py::TestMuonReplacedOnTwo::test_shards_become_replicas",),
    ),
    Fault(
        "a parameter that takes another's place begins without momentum",
        "_muon_engine/engine.py",
        "        self.hand_over_momentum(params, states)\n",
        "",
        (f"{HERE}replaced.py::TestMuonReplacedOnTwo::test_equal_placements",),
    ),
    Fault(
        "ranks that should meet do not wait for each other",
        "_muon_engine/process_groups.py",
        "    if len(ranks) == 1 or world is None",
        "    if ranks or world is None",
        (f"{MEETING}values_of_those_who_meet",),
    ),
    Fault(
        "a rank that waited in vain is taken for one that came the next time",
        "_muon_engine/process_groups.py",
        """        with suppress(RuntimeError):
            store.delete_key(keys[me])
        missing = [
""",
        "        missing = [\n",
        (f"{MEETING}those_who_do_not_come_are_named",),
    ),
    # Failures
    Fault(
        "an error of an exchange names no matrix",
        "_muon_engine/runtime/buffers.py",
        "        carried = listed([layout.describe() for layout in layouts])\n",
        '        carried = "matrices"\n',
        (f"{FAULTY}TestMuonKilled::test_killed",),
    ),
    Fault(
        "a rank that fails does not say why",
        "_muon_engine/engine.py",
        '        self._tell("" if isinstance(error, ExchangeError) else failure)\n',
        '        self._tell("")\n',
        (f"{FAULTY}TestMuonRaises::test_raises",),
    ),
    Fault(
        "a broken group serves again beside new ones",
        "_muon_engine/process_groups.py",
        "    key = ranks, backend, tuple(sorted(group.group_name for group in known))\n",
        "    key = ranks, backend\n",
        (f"{FAULTY}TestMuonStopped::test_stopped",),
    ),
    # Many replicas
    Fault(
        "what a source relays is what the slot held before",
        "_muon_engine/runtime/pipeline.py",
        "                if relay.relay.source == self.rank:\n",
        "                if relay.relay.source == self.rank and not bucket.owned:\n",
        (f"{RELAYS}any_placement",),
    ),
    Fault(
        "a source speaks for itself and not for its replicas",
        "_muon_engine/runtime/pipeline.py",
        "                self._said[self._places_of(numbers)] = joining.wait()\n",
        "                joining.wait()\n",
        (f"{RELAYS}gradient_that_one_rank_lacks",),
    ),
    Fault(
        "the memory of two relays is one",
        "_muon_engine/runtime/buffers.py",
        "        start, ring = 0, itertools.cycle(self._ring)\n",
        "        start, ring = 0, itertools.cycle(self._ring[:1])\n",
        (f"{RELAYS}any_placement",),
    ),
    Fault(
        "updates for replicas are written where matrices were gathered",
        "_muon_engine/schedule/specs.py",
        "        return self.gather_recv == self.scatter_send\n",
        "        return True\n",
        (f"{LAYOUTS}parity_on_every_placement_of_a_2d_mesh",),
    ),
    # Newton-Schulz
    Fault(
        "all steps follow the first Gram matrix",
        "_muon.py",
        "        if growth > _GRAM_GROWTH:\n",
        "        if growth == math.inf:\n",
        (f"{GRAM}distance_from_the_exact_polynomial",),
    ),
)
