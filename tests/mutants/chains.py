"""Defects that only show in the law of many texts, or where a chain is longer than one guess."""

from catalogue import Mutant

CHAINS = "tests/statistical/test_chains_of_guesses.py"
LAW = f"{CHAINS}::test_chains_of_three_keep_the_law"
ALL_ACCEPTED = f"{CHAINS}::test_a_drafter_that_is_the_target_has_every_guess_accepted"

CHAIN_MUTANTS = (
    Mutant(
        28,
        "all guesses of a chain are drawn with the noise of its first",
        "drafters/trees.py",
        "GrowingTree.positions",
        "len(self.request.tokens) + self.depth",
        "len(self.request.tokens)",
        (LAW,),
    ),
    Mutant(
        28,
        "the noise of a chain's first guess for all: under *coupled* it costs acceptance",
        "drafters/next_level.py",
        "draw_on_device",
        "len(tree.request.tokens) + tree.depth",
        "len(tree.request.tokens)",
        (f"{ALL_ACCEPTED}[coupled]",),
    ),
    Mutant(
        24,
        "a drafter tells the q of the level before",
        "drafters/trees.py",
        "GrowingTree.draft",
        "tuple(self._drawn)",
        "tuple([*self._drawn[:1], *self._drawn[:-1]])",
        (LAW,),
    ),
    Mutant(
        24,
        "a drafter tells a q that is a little too flat",
        "drafters/next_level.py",
        "_distributions",
        "kept.log_weights",
        "0.9 * kept.log_weights",
        (ALL_ACCEPTED,),
    ),
    Mutant(
        24,
        "a drafter tells a q that is a little too flat; seen in the law of the texts",
        "drafters/next_level.py",
        "_distributions",
        "kept.log_weights",
        "0.9 * kept.log_weights",
        (LAW,),
    ),
    Mutant(
        12,
        "of several tokens that are committed at once bad words see the newest alone",
        "acceptance/request.py",
        "RequestSampler._add_tokens",
        "tokens[-width:]",
        "tokens[-1:]",
        (f"{CHAINS}::test_bad_words_are_seen_across_several_accepted_guesses",),
    ),
    Mutant(
        16,
        "a draft is judged again when the text has gone on",
        "speculation/proposing.py",
        "usable_part",
        "draft.rebase(request.tokens)",
        "draft",
        (f"{CHAINS}::test_a_draft_that_is_handed_in_again_is_not_judged_again",),
    ),
    Mutant(
        7,
        "a draft model draws padding ids, and its draft is dropped because of what was drawn",
        "drafters/model/autoregressive.py",
        "AutoregressiveDrafter.__init__",
        "ModelRunner.allocate(decoder, self._cache.pool.num_pages, PAGE_SIZE, vocab_size=sampled)",
        "ModelRunner.allocate(decoder, self._cache.pool.num_pages, PAGE_SIZE)",
        (f"{CHAINS}::test_a_draft_model_with_padding_ids_keeps_the_law",),
    ),
    Mutant(
        7,
        "a draft model with another tokenizer reads the target's ids as its own",
        "drafters/model/vocabularies.py",
        "SharedTokens.to_draft_ids",
        "self.to_draft[ids.clamp(min=0).long()]",
        "ids",
        (f"{CHAINS}::test_a_drafter_that_is_the_target_with_other_token_ids_has_every_guess_accepted",),
    ),
    Mutant(
        7,
        "its own draws are read back as its own ids, though they are the target's",
        "drafters/model/vocabularies.py",
        "SharedTokens.to_draft_ids",
        "replace(batch, token_ids=translated, drawn_before=drawn)",
        "replace(batch, token_ids=translated)",
        (f"{CHAINS}::test_a_drafter_that_is_the_target_with_other_token_ids_has_every_guess_accepted",),
    ),
)
