"""Bugs that this field has already had, put in by hand: each must make one of the named tests fail.

The numbers are those of the project's list of known defects. A mutant replaces one syntax node of a function
(`mutation.py`), so comments and line breaks may change without it. Later work adds its own entries.
"""

from dataclasses import dataclass

UNIT = "tests/unit"


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    bug: int  # number in the list of known defects
    what: str  # what goes wrong
    file: str  # under src/foreword
    function: str  # dotted name, such as Class.method; empty: the module itself
    old: str  # an expression or statements, once in the function
    new: str  # what stands there instead; empty: nothing
    tests: tuple[str, ...]  # pytest node ids; at least one must fail


PIPELINE = f"{UNIT}/acceptance/test_pipeline.py"
RULES = f"{UNIT}/acceptance/test_rules.py"
NOISE = f"{UNIT}/acceptance/test_noise.py"
LOGPROBS = f"{UNIT}/acceptance/test_logprobs.py"
ENGINE = "tests/integration/test_sampling_engine.py"
STEP = f"{UNIT}/speculation/test_step.py"
LAYOUT = f"{UNIT}/speculation/test_layout.py"
PADDED = "tests/integration/test_cuda_step.py"
CONTRACT = "tests/integration/test_drafter_contract.py"

MUTANTS = (
    Mutant(
        3,
        "sampling parameters not applied to the rows before the last",
        "acceptance/distribution.py",
        "RowParams.of",
        "return RowParams(*map(torch.from_numpy, columns))",
        "columns[0] = np.where(judged.trees.depths > 0, columns[0], 1.0)\n"
        "return RowParams(*map(torch.from_numpy, columns))",
        (f"{PIPELINE}::test_every_row_has_the_distribution_of_the_reference",),
    ),
    Mutant(
        4,
        "an in-place division corrupts q before rejection",
        "acceptance/rules/chains.py",
        "ratios",
        "ratio[nodes] = np.divide(p, q, out=np.zeros_like(p), where=q > 0)",
        "chains.trees.q.probs.flags.writeable = True\n"
        "chains.trees.q.probs[:] /= 2\n"
        "ratio[nodes] = np.divide(p, q, out=np.zeros_like(p), where=q > 0)",
        (f"{RULES}::test_chain_rules_are_their_references",),
    ),
    Mutant(
        6,
        "a uniform can be exactly 0",
        "acceptance/noise.py",
        "uniforms",
        "mix(keys + np.uint64(GAMMA)) >> np.uint64(10) | np.uint64(1)",
        "mix(keys + np.uint64(GAMMA)) >> np.uint64(10)",
        (f"{NOISE}::test_no_word_makes_a_uniform_of_0_or_1_or_an_infinite_gumbel",),
    ),
    Mutant(
        6,
        "a Gumbel can be infinite",
        "acceptance/noise.py",
        "gumbel",
        "shift_right(bits(keys, tokens), 10) | 1",
        "shift_right(bits(keys, tokens), 10)",
        (f"{NOISE}::test_no_word_makes_a_uniform_of_0_or_1_or_an_infinite_gumbel",),
    ),
    Mutant(
        7,
        "an id of the padding behind the vocabulary comes out",
        "acceptance/batch.py",
        "Judgement.of",
        "logits if logits.shape[1] == vocab_size else logits[:, :vocab_size]",
        "logits",
        (f"{PIPELINE}::test_padding_behind_the_vocabulary_never_comes_out",),
    ),
    Mutant(
        7,
        "a guess outside the vocabulary is looked up as if it were in it",
        "acceptance/rules/chains.py",
        "ChainRows.target",
        "np.where(is_valid, probabilities.cpu().numpy(), 0.0)",
        "probabilities.cpu().numpy()",
        (f"{RULES}::test_a_guess_outside_the_vocabulary_is_never_accepted",),
    ),
    Mutant(
        8,
        "NaN logits are drawn from",
        "acceptance/distribution.py",
        "shape_rows",
        "peak.isnan() | (peak == torch.inf)",
        "peak == torch.inf",
        (f"{PIPELINE}::test_a_poisoned_row_fails_its_own_request_alone",),
    ),
    Mutant(
        9,
        "the padded vocabulary is cut on the wrong axis",
        "acceptance/batch.py",
        "Judgement.of",
        "logits[:, :vocab_size]",
        "logits[:vocab_size]",
        (f"{PIPELINE}::test_padding_behind_the_vocabulary_never_comes_out",),
    ),
    Mutant(
        12,
        "bad words off by one with drafts",
        "acceptance/corrections.py",
        "recent_tokens",
        "judged.trees.path_tokens",
        "np.roll(judged.trees.path_tokens, 1, axis=0)",
        (f"{PIPELINE}::test_bad_words_count_the_draft_path",),
    ),
    Mutant(
        13,
        "log probabilities read after the corrections, in place",
        "acceptance/corrections.py",
        "corrected_logits",
        "judged.logits.clone(memory_format=torch.contiguous_format)",
        "judged.logits",
        (f"{LOGPROBS}::test_logprobs_are_those_of_the_raw_logits",),
    ),
    Mutant(
        23,
        "the seed is ignored",
        "acceptance/request.py",
        "RequestSampler._fill_record",
        "stems(seed, sample, Stream.TARGET, 0)",
        "stems(0, sample, Stream.TARGET, 0)",
        (f"{RULES}::test_seed_and_sample_decide_and_nothing_else_does",),
    ),
    Mutant(
        23,
        "requests without a seed share one",
        "engine/intake.py",
        "Intake.admit",
        "secrets.randbits(53) if params.seed is None else params.seed",
        "params.seed or 0",
        (f"{ENGINE}::test_seeds_are_obeyed_beside_requests_that_have_none",),
    ),
    Mutant(
        24,
        "the draft probabilities of chosen tokens are never filled in",
        "acceptance/rules/trees.py",
        "NodeProbabilities.stack",
        "np.ones(1)",
        "np.full(1, 0.001)",
        (f"{RULES}::test_chain_rules_are_their_references",),
    ),
    Mutant(
        28,
        "a draft node's position is counted on too late",
        "acceptance/batch.py",
        "Judgement.positions",
        "lengths if self.trees.is_plain else lengths + self.trees.depths",
        "lengths + np.maximum(self.trees.depths - 1, 0)",
        (f"{RULES}::test_coupled_is_its_reference",),
    ),
    Mutant(
        35,
        "matches are counted behind a mismatch",
        "acceptance/rules/coupled.py",
        "_deepest",
        "if parent in depths and tokens[row] == draws[parent]:\n"
        "    depths[row] = depths[parent] + 1\n"
        "    if depths[row] > depths[stop]:\n"
        "        stop = row",
        "if tokens[row] == draws[parent]:\n"
        "    depths[row] = depths.get(parent, 0) + 1\n"
        "    if depths[row] > depths[stop]:\n"
        "        stop = row",
        (f"{RULES}::test_coupled_goes_down_chains_and_trees_as_far_as_they_were_drawn",),
    ),
    Mutant(
        35,
        "token acceptance goes on behind a refusal",
        "acceptance/rules/token.py",
        "stop_rows",
        "trees.reached(uniforms < accept)",
        "(uniforms < accept) | (trees.depths == 0)",
        (f"{RULES}::test_chain_rules_are_their_references",),
    ),
    Mutant(
        40,
        "a tree node is judged by the row before it instead of by its parent's",
        "acceptance/rules/coupled.py",
        "_deepest",
        "draws[parent]",
        "draws[row - 1]",
        (f"{RULES}::test_coupled_is_its_reference",),
    ),
    Mutant(
        42,
        "temperature is ignored",
        "acceptance/distribution.py",
        "shape_rows",
        "torch.where(greedy, 1.0, temperature)",
        "torch.ones_like(temperature)",
        (f"{PIPELINE}::test_every_row_has_the_distribution_of_the_reference",),
    ),
    Mutant(
        1,
        "the draft model keeps the KV of guesses that were not committed",
        "drafters/model/autoregressive.py",
        "AutoregressiveDrafter.propose",
        "self._cache.rollback(self._kv(tree.request))",
        "self._cache.advance(self._kv(tree.request), len(tree.tokens))",
        (f"{CONTRACT}::test_a_drafter_guesses_as_a_fresh_one_would",),
    ),
    Mutant(
        10,
        "drafted rows count as computed",
        "kv/paged_cache.py",
        "PagedCache.commit",
        "base + len(path)",
        "sequence.reserved",
        (f"{UNIT}/kv/test_paged_cache.py", STEP),
    ),
    Mutant(
        11,
        "another page size in the draft model's slots",
        "drafters/model/autoregressive.py",
        "AutoregressiveDrafter.__init__",
        "ModelRunner.allocate(decoder, self._cache.pool.num_pages, PAGE_SIZE, vocab_size=sampled)",
        "ModelRunner.allocate(decoder, 2 * self._cache.pool.num_pages, PAGE_SIZE // 2, vocab_size=sampled)",
        (
            "tests/integration/test_llm_speculation.py::test_the_target_as_its_own_draft_model_is_always_right",
        ),
    ),
    Mutant(
        29,
        "room for four guesses only",
        "speculation/transaction.py",
        "Transaction.batch",
        "len(draft.parents)",
        "min(len(draft), 4)",
        (STEP,),
    ),
    Mutant(
        29,
        "a batch that is a little larger than its memory",
        "speculation/layout.py",
        "BatchMemory.views",
        "entries > len(self._memory)",
        "entries > len(self._memory) + 1",
        (LAYOUT,),
    ),
    Mutant(
        31,
        "the device's copy of the batch keeps its first size",
        "backends/torch/upload.py",
        "Upload._new_views",
        "total > len(self._on_device)",
        "total > 2 * len(self._on_device)",
        (f"{PADDED}::test_staging_that_is_too_small_grows",),
    ),
    Mutant(
        19,
        "the rows of a prompt chunk see one another whole",
        "speculation/layout.py",
        "_shape_rows",
        "in_run + 1",
        "np.full(run, run)",
        (LAYOUT,),
    ),
    Mutant(
        37,
        "guesses beyond the end of the answer",
        "speculation/proposing.py",
        "_within_limits",
        "entry.request.room - 1",
        "entry.request.room",
        (STEP,),
    ),
    Mutant(
        38,
        "an n-gram index that outlives its text",
        "drafters/lookup/ngram.py",
        "NgramDrafter._index",
        "index is None or epoch != request.epoch or len(index) > len(request.tokens)",
        "index is None or epoch != request.epoch",
        (f"{UNIT}/drafters/test_ngram_drafter.py",),
    ),
    Mutant(
        41,
        "a drafter that was off does not catch up",
        "drafters/model/autoregressive.py",
        "AutoregressiveDrafter._catch_up",
        "SequenceRows(kv, tokens, share + 1, Draft())",
        "SequenceRows(kv, tokens, 1, Draft(), first=len(tokens) - 1)",
        (f"{CONTRACT}::test_a_drafter_guesses_as_a_fresh_one_would",),
    ),
)
