"""Known defects of batching, preemption and the books of requests and pages."""

from catalogue import RULES, UNIT, Mutant

WORLDS = "tests/integration/test_engine_model_check.py::test_worlds"
FAIRNESS = f"{UNIT}/control/test_fairness.py"

ENGINE_MUTANTS = (
    Mutant(
        2,
        "verdicts are handed out in another order than the rows",
        "speculation/accept.py",
        "            for place, index in enumerate(self.drawing):",
        "            for place, index in enumerate(sorted(self.drawing, reverse=True)):",
        (WORLDS,),
    ),
    Mutant(
        2,
        "rows are laid out in another order than the verdicts come",
        "speculation/transaction.py",
        "            for entry, draft, wants in zip(self.entries, drafts, watched, strict=True)\n        ]",
        "            for entry, draft, wants in sorted(\n"
        "                zip(self.entries, drafts, watched, strict=True),\n"
        "                key=lambda row: -row[0].request.request_id,\n"
        "            )\n        ]",
        (WORLDS,),
    ),
    Mutant(
        5,
        "the target's probability of a drafted token is zeroed before it is read",
        "acceptance/rules/chains.py",
        "    ratio = np.zeros(len(tokens))\n",
        "    ratio = np.zeros(len(tokens))\n    p[::7] = 0.0\n",
        (f"{RULES}::test_chain_rules_are_their_references",),
    ),
    Mutant(
        10,
        "a page is published while one of its rows still lies among the guesses",
        "kv/row_moves.py",
        "        return min(waiting, default=owner.computed)",
        "        return owner.computed",
        (WORLDS,),
    ),
    Mutant(
        10,
        "pages are published before it is known which of their rows are committed",
        "speculation/transaction.py",
        "            entry.request.commit(verdict)\n            cache.commit(entry.kv, entry.run, verdict.path)\n",
        "            entry.request.commit(verdict)\n"
        "            computed, entry.kv.computed = entry.kv.computed, entry.kv.reserved\n"
        "            cache.publish(entry.kv, entry.request.tokens)\n            entry.kv.computed = computed\n"
        "            cache.commit(entry.kv, entry.run, verdict.path)\n",
        (WORLDS,),
    ),
    Mutant(
        16,
        "drafts outlive a preemption",
        "engine/requests/request.py",
        "        self.epoch += 1\n",
        "",
        (f"{FAIRNESS}::test_a_draft_from_before_a_preemption_is_not_judged",),
    ),
    Mutant(
        17,
        "the verdict of a pass is committed to a request that is gone",
        "speculation/transaction.py",
        "        if not entry.is_present:\n            return False\n",
        "",
        (WORLDS,),
    ),
    Mutant(
        17,
        "the verdict of a pass is committed to the request that was begun anew",
        "speculation/transaction.py",
        "        if not entry.is_present:",
        "        if not entry.is_present and entry.request.finish_reason is not None:",
        (WORLDS,),
    ),
    Mutant(
        18,
        "a sequence that is closed still says how much it holds",
        "kv/paged_cache.py",
        "        sequence.pages, sequence.chain, sequence.extra = [], [], {}\n"
        "        sequence.computed = sequence.reserved = sequence.ahead = sequence.passes = 0\n",
        "        sequence.chain = []\n",
        (WORLDS,),
    ),
    Mutant(
        27,
        "the requests that draw are taken from the front of the batch",
        "speculation/accept.py",
        "[entries[index].request.sampler for index in drawing]",
        "[entry.request.sampler for entry in entries[: len(drawing)]]",
        (WORLDS,),
    ),
    Mutant(
        30,
        "only the newest of the accepted tokens is counted",
        "engine/requests/request.py",
        "            self.sampler.commit(tokens)",
        "            self.sampler.commit(tokens[-1:])",
        (WORLDS,),
    ),
    Mutant(
        32,
        "a chunk that holds the prompt's end draws a token, though more was committed",
        "speculation/requests.py",
        "first + run == length + pending, pending",
        "first + run >= request.prompt_len, pending",
        (WORLDS,),
    ),
    Mutant(
        33,
        "a page with rows of guesses alone is not given back",
        "kv/paged_cache.py",
        "            self.pool.release(sequence.pages[keep:])\n            del sequence.pages[keep:]",
        "            del sequence.pages[keep:]",
        (WORLDS,),
    ),
    Mutant(
        33,
        "a preempted request keeps its pages",
        "engine/stepping/scheduler.py",
        "        self.running.remove(request)\n        self._cache.close(request.kv)\n        request.preempt()",
        "        self.running.remove(request)\n        request.preempt()",
        (WORLDS,),
    ),
    Mutant(
        33,
        "a cancelled request keeps its pages",
        "engine/stepping/scheduler.py",
        "            self.kept_prompts.keep(request, self.waiting)\n            self._cache.close(request.kv)\n",
        "            self.kept_prompts.keep(request, self.waiting)\n",
        (WORLDS,),
    ),
    Mutant(
        34,
        "an answer of one token does not end",
        "engine/requests/request.py",
        "            if count == self.room:",
        "            if count == self.room and len(self.tokens) + count > self.prompt_len + 1:",
        (WORLDS,),
    ),
    Mutant(
        39,
        "a sequence's pages are taken for neighbours",
        "kv/paged_cache.py",
        "        return sequence.pages[row // self.page_size] * self.page_size + row % self.page_size",
        "        return sequence.pages[0] * self.page_size + row",
        (WORLDS,),
    ),
    Mutant(
        39,
        "a fork shares the page that it goes on writing",
        "kv/paged_cache.py",
        "        shared = min(rows, self._moves.settled(sequence)) // self.page_size\n",
        "        shared = self.pages_for(min(rows, self._moves.settled(sequence)))\n",
        (WORLDS,),
    ),
    Mutant(
        18,
        "the masks of the batch before stay in memory that is used again",
        "speculation/rows/layout.py",
        "    arrays.ancestor_masks.fill(0)\n",
        "",
        (WORLDS,),
    ),
    Mutant(
        18,
        "a block table of the same length is taken for the same table",
        "speculation/rows/batch_memory.py",
        "if known != sequence.pages:",
        "if len(known) != len(sequence.pages):",
        (WORLDS,),
    ),
    Mutant(
        39,
        "rows are laid out as if a request's pages lay behind its first one",
        "speculation/rows/layout.py",
        "arrays.block_tables[ways.part_of, page] * page_size",
        "(arrays.block_tables[ways.part_of, 0] + page) * page_size",
        (WORLDS,),
    ),
)
