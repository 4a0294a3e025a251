"""Defects of drafters that go by what the target drew, and of looking things up in datastores."""

from catalogue import UNIT, Mutant

WINDOW = f"{UNIT}/drafters/test_lookahead_drafter.py"
JACOBI = f"{UNIT}/drafters/test_jacobi_drafter.py"
STORE = f"{UNIT}/drafters/test_datastore.py"
REST = f"{UNIT}/drafters/test_rest_drafter.py"

WINDOW_MUTANTS = (
    Mutant(
        40,
        "the draw after a node is read as the draw after the one before it",
        "drafters/lookup/judged_draft.py",
        "        place = node + 1\n",
        "        place = max(node, 0)\n",
        (WINDOW, JACOBI),
    ),
    Mutant(
        28,
        "a column hangs below the first of the first row",
        "drafters/lookup/lookahead.py",
        "return [*first[1 : column + 1], *(row[column] for row in others)]",
        "return [*first[1:2], *(row[column] for row in others)]",
        (f"{WINDOW}::test_the_window_is_a_tree_of_columns_below_the_first_row",),
    ),
    Mutant(
        28,
        "the first column's n-gram is kept under a token of the window",
        "drafters/lookup/lookahead.py",
        "commit.request.tokens[commit.draft.committed_len - 1]",
        "self._rows[0][0]",
        (f"{WINDOW}::test_what_was_drawn_after_the_last_row_is_the_next_and_every_column_an_ngram",),
    ),
    Mutant(
        28,
        "the window forgets its newest row instead of its oldest",
        "drafters/lookup/lookahead.py",
        "else self._rows[1:]",
        "else self._rows[:-1]",
        (f"{WINDOW}::test_what_was_drawn_after_the_last_row_is_the_next_and_every_column_an_ngram",),
    ),
    Mutant(
        47,
        "an ended request's window comes back with a late commit",
        "drafters/lookup/lookahead.py",
        "            reader = self._known.get(commit.request.request_id)\n",
        "            reader = self._known.setdefault(commit.request.request_id, _Reader(self._config))\n",
        (f"{WINDOW}::test_a_request_that_is_gone_is_not_taken_up_again",),
    ),
    Mutant(
        29,
        "the pool grows without bound",
        "drafters/lookup/ngram_pool.py",
        "        if self._count > self._most:",
        "        if False:",
        (f"{WINDOW}::test_the_pool_forgets_what_was_used_longest_ago",),
    ),
    Mutant(
        28,
        "Jacobi's guesses are those for the places that the text has filled",
        "drafters/lookup/jacobi.py",
        "    return drawn[len(commit.request.tokens) - commit.draft.committed_len :]",
        "    return drawn",
        (JACOBI,),
    ),
    Mutant(
        41,
        "Jacobi's guesses stay behind a text that grew without them",
        "drafters/lookup/jacobi.py",
        "        del ahead.tokens[: len(request.tokens) - ahead.end]",
        "        del ahead.tokens[:0]",
        (f"{JACOBI}::test_guesses_move_on_with_a_text_that_grew_without_them",),
    ),
    Mutant(
        24,
        "a drafter that needs the target's draws gets none under other rules",
        "acceptance/judge.py",
        "self._draws = _COUPLED in in_use or judged.wants_draws",
        "self._draws = _COUPLED in in_use",
        (f"{UNIT}/acceptance/test_rules.py::test_what_the_target_draws_is_told_under_every_rule",),
    ),
    Mutant(
        10,
        "pages are published with the rows of guesses",
        "kv/paged_cache.py",
        "self._window.publishable(min(self._moves.settled(sequence), len(tokens)) // self.page_size)",
        "self._window.publishable(min(sequence.computed, len(tokens)) // self.page_size)",
        ("tests/integration/test_engine_model_check.py::test_worlds_with_windows_beside_the_guesses",),
    ),
    Mutant(
        39,
        "matches across the border of two shards are lost",
        "drafters/datastore/build.py",
        "reach = min(count + DEPTH, writer.tokens - first)",
        "reach = count",
        (f"{STORE}::test_the_longest_end_is_found_wherever_it_occurs",),
    ),
    Mutant(
        39,
        "a longer match is looked for only in the shard in which the shorter one begins",
        "drafters/datastore/search.py",
        "        earlier = -(-(stride - 1) // self.header.shard_tokens)",
        "        earlier = 0",
        (f"{STORE}::test_the_longest_end_is_found_wherever_it_occurs",),
    ),
    Mutant(
        39,
        "a continuation goes on into the next text",
        "drafters/datastore/build.py",
        "        writer.end_text()\n",
        "",
        (STORE,),
    ),
    Mutant(
        38,
        "of many matches the first in order are taken",
        "drafters/datastore/search.py",
        "np.arange(min(total, most)) * total // min(total, most)",
        "np.arange(min(total, most))",
        (f"{STORE}::test_of_many_matches_some_are_taken_at_even_distances",),
    ),
    Mutant(
        49,
        "an unfinished datastore is taken for whole",
        "drafters/datastore/format.py",
        "    if size != header.file_bytes:",
        "    if False:",
        (f"{STORE}::test_a_file_that_ends_early_or_late_is_damaged",),
    ),
    Mutant(
        49,
        "a datastore of another tokenizer is read",
        "drafters/lookup/rest.py",
        "    if store.header.tokenizer != fingerprint(",
        "    if not store.header.tokenizer and fingerprint(",
        (f"{REST}::test_another_tokenizer_is_refused",),
    ),
)
