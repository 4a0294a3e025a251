"""Defects of guesses that a device still makes while their pass is laid out."""

from catalogue import Mutant

PENDING = "tests/unit/speculation/test_pending_drafts.py"
SAME_TEXT = f"{PENDING}::test_they_are_read_after_their_pass_and_the_text_is_the_plain_one"

PENDING_MUTANTS = (
    Mutant(
        48,
        "guesses stay unread where what is drawn depends on them",
        "speculation/proposing.py",
        "    return draft.known() if is_other or not entry.request.sampler.can_be_followed else draft",
        "    return draft.known() if is_other else draft",
        (SAME_TEXT,),
    ),
    Mutant(
        48,
        "a pass reads the guesses of two devices from one",
        "speculation/proposing.py",
        "    return draft.known() if is_other or not entry.request.sampler.can_be_followed else draft",
        "    return draft if entry.request.sampler.can_be_followed else draft.known()",
        (f"{PENDING}::test_a_pass_takes_the_guesses_of_one_source",),
    ),
    Mutant(
        48,
        "a guess that could not be drawn is none, though its pass has read one",
        "speculation/draft.py",
        "        return tuple([max(found[place], 0) for place in self.places])",
        "        return tuple([found[place] for place in self.places])",
        (f"{PENDING}::test_where_nothing_could_be_drawn_it_says_what_the_pass_has_read",),
    ),
    Mutant(
        48,
        "guesses are judged by where they stand instead of by what they are",
        "speculation/accept.py",
        "                self.judging.know(stack([self.drafts[index] for index in self.drawing]))",
        "                self.judging.know(self.judging.judged.trees)",
        (SAME_TEXT,),
    ),
    Mutant(
        48,
        "the time that a device drafts is nobody's",
        "speculation/proposing.py",
        "            replace(call, seconds=max(call.seconds, seconds))",
        "            replace(call, seconds=call.seconds)",
        (f"{PENDING}::test_a_call_took_as_long_as_the_device_did",),
    ),
)
