"""Defects of draft nodes: texts that run apart, waits without end, noise that leaks, strangers that are let in."""

from catalogue import UNIT, Mutant

CLUSTER = f"{UNIT}/cluster"
REMOTE = f"{CLUSTER}/test_remote.py"
SESSION = f"{CLUSTER}/test_node_session.py"
HANDSHAKE = f"{CLUSTER}/test_handshake.py"
CONNECTION = f"{CLUSTER}/test_connection.py"
HOMES = f"{CLUSTER}/test_homes.py"
SHARDS = f"{UNIT}/backends/parallel/test_shards.py"
EXCHANGE = f"{UNIT}/backends/parallel/test_exchange.py"
RANKS = "tests/integration/test_tensor_parallel.py"
ROUTER = f"{UNIT}/server/test_router.py"
SCALING = f"{CLUSTER}/test_scaling.py"
WAITING = f"{CLUSTER}/test_waiting.py"
RATIO = f"{CLUSTER}/test_ratio.py"

CLUSTER_MUTANTS = (
    Mutant(
        95,
        "a drafter goes on behind guesses that were wrong",
        "cluster/node/session.py",
        "            self._epoch += 1\n",
        "",
        (f"{SESSION}::test_if_the_text_takes_another_way_the_drafter_hears_of_another_epoch",),
    ),
    Mutant(
        95,
        "tokens that a node has missed are left out of its text",
        "cluster/node/session.py",
        "        if first > self._committed:\n            return False\n",
        "",
        (f"{SESSION}::test_commits_may_come_twice_late_and_not_at_all",),
    ),
    Mutant(
        95,
        "an ended text is remembered with the guesses behind it",
        "cluster/node/session.py",
        '        """The request as it was last, without guesses."""\n        return self._request(self._committed)',
        '        """The request as it was last, without guesses."""\n        return self._request(len(self._written))',
        (f"{SESSION}::test_what_goes_is_learned_without_guesses",),
    ),
    Mutant(
        95,
        "what is drafted ahead comes before those who wait",
        "cluster/node/desk.py",
        "key=lambda one: (one[1].is_prefetch, -one[1].value)",
        "key=lambda one: -one[1].value",
        (f"{SESSION}::test_whoever_waits_comes_before_what_is_drafted_ahead_and_value_decides",),
    ),
    Mutant(
        95,
        "a token that does not exist breaks the drafter for all targets",
        "cluster/node/desk.py",
        "            if tokens and max(tokens) >= self._limits.vocab_size:",
        "            if tokens and max(tokens) >= 1 << 40:",
        (f"{SESSION}::test_what_would_break_the_drafter_for_all_targets_ends_the_connection",),
    ),
    Mutant(
        95,
        "the noise of a rule that a node could bias leaves the target",
        "cluster/sampling.py",
        '        int(record["stem"]) if is_coupled else 0,',
        '        int(record["stem"]),',
        (f"{REMOTE}::test_rules_that_a_node_could_bias_tell_it_nothing_of_their_noise",),
    ),
    Mutant(
        95,
        "a node that hangs is not known as late",
        "cluster/remote/drafter.py",
        "            pairing.peer.breaker.late(now - pairing.asked_at)\n",
        "",
        (f"{REMOTE}::test_a_node_that_hangs_costs_one_bounded_wait",),
    ),
    Mutant(
        95,
        "a wait goes on for a session that is no more",
        "cluster/remote/drafter.py",
        "        pairing.is_all = True  # whoever waits for it waits in vain\n",
        "",
        (f"{REMOTE}::test_a_node_that_gives_a_session_up_ends_the_wait_for_it",),
    ),
    Mutant(
        95,
        "an older guess replaces a newer one",
        "cluster/remote/pairing.py",
        "        if guess.number <= self.number:\n            return True\n",
        "",
        (f"{REMOTE}::test_old_doubled_and_unknown_guesses_are_dropped",),
    ),
    Mutant(
        95,
        "tenants whose texts must stay go to nodes",
        "cluster/remote/drafter.py",
        "        if any(fnmatchcase(request.tenant, pattern) for pattern in self._local_tenants):",
        "        if False:",
        (f"{REMOTE}::test_texts_of_local_tenants_are_told_to_nobody",),
    ),
    Mutant(
        95,
        "a node that knows no token is used",
        "cluster/handshake.py",
        "    if not security.is_proof(welcome.proof, NODE, challenge.nonce, nonce):",
        "    if not welcome.proof:",
        (f"{HANDSHAKE}::test_a_node_that_does_not_know_the_token_is_not_used",),
    ),
    Mutant(
        95,
        "a side that does not read keeps everything in memory",
        "cluster/connection.py",
        "            if self._unsent_bytes > self._max_unsent:",
        "            if self._unsent_bytes > 1 << 24:",
        (f"{CONNECTION}::test_a_side_that_does_not_read_is_hung_up_on",),
    ),
    Mutant(
        95,
        "one node gets all requests",
        "cluster/homes.py",
        "            return max(free, key=lambda place: _score(request, place)).name",
        "            return max(free, key=lambda place: place.capacity).name",
        (f"{HOMES}::test_when_a_node_leaves_only_its_requests_get_another_home",),
    ),
    Mutant(
        95,
        "every rank adds the sums of all beginning with its own",
        "backends/parallel/exchange.py",
        "        return in_rank_order(self._gathered(part))\n",
        "        parts = self._gathered(part)\n"
        "        return in_rank_order([*parts[self.rank :], *parts[: self.rank]])\n",
        (f"{EXCHANGE}::test_sums_are_added_in_the_order_of_the_ranks_at_every_rank",),
    ),
    Mutant(
        95,
        "a norm over all heads takes a rank's own heads for all",
        "backends/parallel/exchange.py",
        "        return self.total(part.sum(-1, keepdim=True)) / (part.shape[-1] * self.size)",
        "        return part.mean(-1, keepdim=True)",
        (f"{EXCHANGE}::test_means_are_over_the_columns_of_all",),
    ),
    Mutant(
        95,
        "a rank reads the share of another",
        "backends/parallel/shards.py",
        "        begin = self.rank * whole // self.size // own * own\n",
        "        begin = (self.rank + 1) % self.size * whole // self.size // own * own\n",
        (f"{SHARDS}::test_the_shares_of_all_ranks_are_the_whole",),
    ),
    Mutant(
        95,
        "a bias is added once by every rank",
        "backends/parallel/shards.py",
        "        if name.endswith(_ADDED_ONCE) and self._shard.rank:",
        "        if False:",
        (f"{SHARDS}::test_the_shares_of_all_ranks_are_the_whole",),
    ),
    Mutant(
        95,
        "ranks that share a KV head read past it",
        "backends/parallel/shards.py",
        "        begin = self.rank * whole // self.size // own * own\n",
        "        begin = self.rank * own\n",
        (f"{SHARDS}::test_ranks_that_share_a_kv_head_all_have_it",),
    ),
    Mutant(
        95,
        "rows that heads want moved are moved at the first rank alone",
        "backends/parallel/decoder.py",
        "            self._workers.run(Move(self.number), lambda: self.own.move(copies), packed_moves(copies))",
        "            self.own.move(copies)",
        (f"{RANKS}::test_rows_are_moved_at_all_ranks",),
    ),
    Mutant(
        95,
        "a rank runs a pass without the moves that come with it",
        "backends/parallel/worker.py",
        "        batch = replace(batch, drawn_before=drawn, adapters=tuple(order.adapters))",
        "        batch = replace(batch, drawn_before=drawn, adapters=tuple(order.adapters), "
        "kv_copies=batch.kv_copies[:0])",
        (f"{RANKS}::test_guesses_on_two_ranks_do_not_change_their_text",),
    ),
    Mutant(
        95,
        "a rank that fails in a pass goes on with the next",
        "backends/parallel/exchange.py",
        "            for one in planned[self._done :]:",
        "            for one in planned[len(planned) :]:",
        (f"{EXCHANGE}::test_a_rank_that_fails_in_a_pass_takes_part_in_the_rest_of_it",),
    ),
    Mutant(
        95,
        "a request fails for the death of a rank, and the engine goes on without it",
        "speculation/recovery.py",
        "            return [self._plainly(present)]\n        except EngineStopped:\n            raise\n",
        "            return [self._plainly(present)]\n",
        (f"{UNIT}/speculation/test_recovery.py::test_what_ends_the_engine_is_not_recovered_from",),
    ),
    Mutant(
        95,
        "a router's memory of prompts is the same for all tenants",
        "server/router/prefixes.py",
        "        owner = key = blake2b(tenant, key=self._secret, digest_size=16).digest()",
        '        owner = key = blake2b(b"", key=self._secret, digest_size=16).digest()',
        (f"{ROUTER}::test_what_one_tenant_asks_tells_another_nothing",),
    ),
    Mutant(
        95,
        "a router asks another target for an answer of which the client has a part",
        "server/router/relay.py",
        "        except httpx2.TransportError as error:\n            metrics.broken",
        '        except httpx2.TransportError as error:\n            raise NotTakenError("broke off") from None\n'
        "            metrics.broken",
        (f"{ROUTER}::test_an_answer_of_which_a_byte_was_passed_on_is_never_asked_for_again",),
    ),
    Mutant(
        95,
        "what is said while nodes are gone is counted as theirs",
        "control/decisions/choosing.py",
        '    return "+".join(present) or plan.method',
        "    return plan.method",
        (
            f"{UNIT}/control/test_absent_drafters.py"
            "::test_what_is_guessed_while_nodes_are_gone_says_nothing_of_them",
        ),
    ),
    Mutant(
        95,
        "a peak that passes adds draft nodes",
        "cluster/pools/scaling.py",
        "        if self._few_since is not None and now - self._few_since >= rule.up_seconds:",
        "        if self._few_since is not None:",
        (f"{SCALING}::test_a_peak_that_passes_changes_nothing",),
    ),
    Mutant(
        95,
        "draft nodes go as soon as they are not needed",
        "cluster/pools/scaling.py",
        "    if not holds:\n        return None\n",
        "",
        (f"{SCALING}::test_a_peak_that_passes_changes_nothing",),
    ),
    Mutant(
        95,
        "what was added for a load is taken away under the same load",
        "cluster/pools/scaling.py",
        "nodes_needed(demands, speed, rule, rule.idle)",
        "nodes_needed(demands, speed, rule, 1.0)",
        (f"{SCALING}::test_the_answer_to_too_few_is_no_reason_for_fewer",),
    ),
    Mutant(
        95,
        "a node of another machine joins by the list without token and TLS",
        "cluster/remote/roster.py",
        "            if address not in self._known and self._may_join(address):",
        "            if address not in self._known:",
        (f"{CLUSTER}/test_roster.py::test_nodes_join_and_leave_as_the_file_says",),
    ),
    Mutant(
        95,
        "a Ray of several machines is used though it asks for no token",
        "cluster/rayed/connecting.py",
        "    if machines > 1 and not (guarded and all(guarded)):",
        "    if machines > 1 and not any(guarded):",
        (f"{CLUSTER}/test_rayed.py::test_beyond_one_machine_all_who_run_there_must_be_asked_for_a_token",),
    ),
    Mutant(
        95,
        "deep levels of a near node count as late",
        "cluster/remote/waiting.py",
        "            when += one.level_seconds  # levels",
        "            when += one.level_seconds\n            if when > one.late_after:\n                break  # levels",
        (f"{WAITING}::test_levels_behind_the_next_may_come_later_than_that_one",),
    ),
    Mutant(
        95,
        "levels that are drafted ahead do not count for the number of nodes",
        "cluster/ratio.py",
        "        drafting = work.ahead * work.levels * level_seconds(requests)",
        "        drafting = work.levels * level_seconds(requests)",
        (f"{RATIO}::test_a_node_takes_as_many_requests_as_fit_into_its_part_of_a_step",),
    ),
)
