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

FAULTS = (
    # Who owns what
    Fault(
        "two owners are swapped on one rank, after all have agreed",
        "_muon_engine/engine.py",
        "                [owner for _, owner in chosen],\n",
        """                [
                    {0: 1, 1: 0}.get(owner, owner) if self.rank == 1 else owner
                    for _, owner in chosen
                ],
""",
        (f"{ERRORS}nothing_changes_before_an_error_and_all_works_after_it",),
    ),
    Fault(
        "of equally busy ranks, each takes itself for the owner",
        "_muon_engine/schedule/owners.py",
        "        owner = min(layout.group, key=lambda r: (load[r], inbound[r] + missing[r], r))\n",
        """        from torch.optim._muon_engine.functions import process_rank

        me = process_rank()
        owner = min(
            layout.group, key=lambda r: (load[r], inbound[r] + missing[r], r != me, r)
        )
""",
        (f"{LAYOUTS}assignments_are_one_owner_each_and_equal_on_all_ranks",),
    ),
    Fault(
        "owners are of the first replica only",
        "_muon_engine/schedule/owners.py",
        "        owner = min(layout.group, key=",
        "        owner = min(dict(zip(layout.shards[::-1], layout.ranks[::-1])).values(), key=",
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
        "the result is sent to the ranks that were asked for pieces, and to no other replica",
        "_muon_engine/schedule/buckets.py",
        "travels = self.is_source if gather else self.receives",
        "travels = self.is_source",
        (f"{LAYOUTS}parity_on_every_placement_of_a_2d_mesh",),
    ),
    # What travels
    Fault(
        "only the first rectangle of a piece is packed",
        "_muon_engine/runtime/assembly.py",
        "in buffers.gather_send.regions(matrix):",
        "in buffers.gather_send.regions(matrix)[:1]:",
        (f"{FSDP1}flags",),
    ),
    Fault(
        "only the first rectangle of the result is packed",
        "_muon_engine/runtime/assembly.py",
        "in buffers.scatter_send.regions(matrix):",
        "in buffers.scatter_send.regions(matrix)[:1]:",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "pieces travel in their own dtype instead of bfloat16",
        "_muon_engine/schedule/buckets.py",
        "gather_dtype = layout.dtype if layout.partial else wire_dtype",
        "gather_dtype = layout.dtype",
        (f"{EXCHANGE}bytes_of_wide_parameters_travel_rounded",),
    ),
    Fault(
        "the owner orthogonalizes its own piece, with zeros for the others'",
        "_muon_engine/runtime/assembly.py",
        "        region.of_matrix(out).copy_(view)\n",
        "        region.of_matrix(out).zero_()\n",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "the momentum is sent without the look-ahead of nesterov",
        "_muon_engine/runtime/pipeline.py",
        "assembly.pack(buffers, matrix, partial(self.blended, matrix))",
        "momentum = self.momentum[self.index_of(matrix)]\n"
        "                assembly.pack(buffers, matrix, lambda region: region.of_local(momentum))",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "contributions to a sum are taken for replicas, so that one is sent",
        "_muon_engine/layouts/__init__.py",
        "    contributions = layout.contributions or (0,) * len(layout.ranks)\n",
        "    contributions = (0,) * len(layout.ranks)\n",
        (f"{PARTIAL}partial_parameters",),
    ),
    Fault(
        "contributions to a sum are added as they come",
        "_muon_engine/runtime/assembly.py",
        "in sorted(parts, key=lambda part: part[0]):",
        "in parts:",
        (f"{PARTIAL}contributions_are_added_in_the_order_of_the_group",),
    ),
    # When it travels
    Fault(
        "a group has one slot too few",
        "_muon_engine/runtime/buffers.py",
        "range(min(len(programs), self.prefetch_count + 2))",
        "range(min(len(programs), self.prefetch_count + 1))",
        (f"{LAYOUTS}parity_on_a_mesh_of_four",),
    ),
    Fault(
        "the next gather takes a slot before its updates are applied",
        "_muon_engine/runtime/pipeline.py",
        """            if previous is not None:
                self.finish(previous)
            following = exchange.follower(buffers)
            if following is not None:
                self.gather(following)
            previous = buffers
""",
        """            following = exchange.follower(buffers)
            if following is not None:
                self.gather(following)
            if previous is not None:
                self.finish(previous)
            previous = buffers
""",
        (f"{LAYOUTS}prefetch_and_async_change_nothing",),
    ),
    Fault(
        "lookahead counts a rank's own rounds instead of each group's",
        "_muon_engine/runtime/pipeline.py",
        """        for buffers in exchange.buckets:
            if buffers.bucket.index <= exchange.prefetch_count:
                self.gather(buffers)
        previous: BucketBuffers | None = None
        for buffers in exchange.buckets:
            buffers.wait()
            self.orthogonalize(buffers)
            buffers.start_scatter()
            if self.schedule.one_owner_at_a_time and exchange.prefetch_count == 0:
                # For debugging, nothing overlaps.
                self.finish(buffers)
                following = exchange.follower(buffers)
                if following is not None:
                    self.gather(following)
                continue
            # Its slot is the one that the next gather takes.
            if previous is not None:
                self.finish(previous)
            following = exchange.follower(buffers)
            if following is not None:
                self.gather(following)
            previous = buffers
""",
        """        ahead = exchange.prefetch_count + 1
        for buffers in exchange.buckets[:ahead]:
            self.gather(buffers)
        previous: BucketBuffers | None = None
        for number, buffers in enumerate(exchange.buckets):
            buffers.wait()
            self.orthogonalize(buffers)
            buffers.start_scatter()
            if previous is not None:
                self.finish(previous)
            for following in exchange.buckets[number + ahead : number + ahead + 1]:
                self.gather(following)
            previous = buffers
""",
        (f"{LAYOUTS}second_group_on_half_of_the_ranks",),
    ),
    Fault(
        "a rank that has nothing to send leaves the collective out",
        "_muon_engine/runtime/buffers.py",
        "        if self.group is None:\n            return\n        # The handle",
        "        if self.group is None or not send.flat.numel():\n            return\n        # The handle",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
        hangs_after=60,
    ),
    Fault(
        "a rank without gradients for a round leaves the gather out",
        "_muon_engine/runtime/pipeline.py",
        "        buffers.start_gather()\n",
        """        if any(
            self.grads[self.index_of(matrix)] is not None
            for matrix in buffers.bucket.matrices
        ):
            buffers.start_gather()
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
    # Gradients and momentum
    Fault(
        "a rank without a gradient abstains",
        "_muon_engine/runtime/pipeline.py",
        "return HAS_NONE if self.grads[index] is None else HAS_GRAD",
        "return ABSTAINS if self.grads[index] is None else HAS_GRAD",
        (f"{EXCHANGE}gradient_on_some_holders_only_is_an_error_on_every_holder",),
    ),
    Fault(
        "the momentum of a flat parameter is updated once for each matrix in it",
        "_muon_engine/runtime/pipeline.py",
        "            if index in self.grads:\n                continue\n            self.look_up(index)\n",
        "            self.look_up(index)\n",
        (f"{FSDP1}flags",),
    ),
    Fault(
        "a rank whose piece is empty keeps no momentum",
        "_muon_engine/runtime/pipeline.py",
        "            self.keep(layout.key.index, new_momentum_buffer(param))\n",
        "            pass\n",
        (f"{EXCHANGE}empty_shard_needs_no_gradient",),
    ),
    Fault(
        "momentum is a plain tensor where the parameter is a DTensor",
        "_muon_engine/local.py",
        "    return like_param(param, torch.zeros_like(local_part(param)))\n",
        "    return torch.zeros_like(local_part(param))\n",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    # The update
    Fault(
        "the learning rate is scaled by the shape of the piece",
        "_muon_engine/runtime/pipeline.py",
        "Move(region.of_local(local), update, hyper, layout.shape, region)",
        "Move(region.of_local(local), update, hyper, tuple(local.shape), region)",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "weights decay on the owner only",
        "_muon_engine/runtime/pipeline.py",
        "        local = local_part(param)\n        self.log_phase",
        """        if self.schedule.owners[matrix] != self.rank:
            hyper = hyper._replace(weight_decay=0.0)
        local = local_part(param)
        self.log_phase""",
        (f"{LAYOUTS}fewer_matrices_than_ranks",),
    ),
    Fault(
        "a bfloat16 piece is rounded as if it were the whole matrix",
        "_muon_engine/apply.py",
        "    if param.dtype != update.dtype:\n",
        "    if param.dtype != update.dtype or region.numel:\n",
        (f"{LAYOUTS}dtypes",),
    ),
    Fault(
        "the caller's autocast reaches the iteration",
        "_muon_engine/engine.py",
        "with torch.autocast(self._kind, enabled=False):",
        "with torch.no_grad():",
        (f"{LAYOUTS}autocast_does_not_reach_the_iteration",),
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
        "_muon_engine/group_functions.py",
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
        "an FSDP1 piece is read as if it began with a row",
        "_muon_engine/layouts/fsdp1.py",
        "offset + at - start, width)",
        "offset + (at - start) // columns * columns, width)",
        (f"{FSDP1}flags",),
    ),
    # Agreement
    Fault(
        "an error of one rank is raised before the others know",
        "_muon_engine/engine.py",
        """        if self.built is None:
            if error is not None:
                raise error
            return
""",
        """        if error is not None:
            raise error
        if self.built is None:
            return
""",
        (f"{ERRORS}one_rank_with_a_bad_assign_fn",),
    ),
    Fault(
        "what ranks know is not compared at construction",
        "_muon_engine/agreement.py",
        "reports = exchange_objects(group, (reported(error), digest))",
        'reports = exchange_objects(group, (reported(error), ""))',
        (f"{ERRORS}different_hyperparameters",),
    ),
    Fault(
        "what a rank found goes through its groups once, and not back",
        "_muon_engine/agreement.py",
        "(*shared, *reversed(shared))",
        "shared",
        (f"{ERRORS}error_at_an_end_of_a_chain_of_groups",),
    ),
    Fault(
        "steps are not counted, so that their exchanges are not told apart",
        "_muon_engine/engine.py",
        "        self.calls += 1\n",
        "        self.calls = 1\n",
        (f"{EXCHANGE}ranks_that_are_not_in_the_same_step",),
    ),
    Fault(
        "exchanges of another step or round are not noticed",
        "_muon_engine/runtime/pipeline.py",
        "            (OUT_OF_STEP, strayed),\n",
        "",
        (f"{EXCHANGE}ranks_that_are_not_in_the_same_step",),
    ),
    Fault(
        "holders that came to different layouts by process groups go on",
        "_muon_engine/layouts/merge.py",
        "if its[called][0] != digest:",
        "if False:",
        (f"{MODULES}replicate_group_on_some_ranks_only",),
        hangs_after=60,
    ),
)
