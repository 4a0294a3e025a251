"""Known defects around the ends of answers, their log probabilities and chunked prompts."""

from catalogue import UNIT, Mutant

TEXT = f"{UNIT}/engine/test_answer_text.py"
BLOCKS = "tests/integration/test_ends_in_blocks.py"
EVERY_END = f"{BLOCKS}::test_every_end_at_every_place_of_a_block[some]"
SCORES = "tests/integration/test_answer_logprobs.py"
MANY = "tests/integration/test_many_answers.py"
ASYNC = "tests/integration/test_async_engine.py"

END_MUTANTS = (
    Mutant(
        14,
        "every chunk's prompt scores are taken for those of the prompt's first tokens",
        "speculation/accept.py",
        "_prompt_scores",
        "request.tokens[request.scored + 1:request.scored + 1 + entry.scored]",
        "request.tokens[1:1 + entry.scored]",
        (f"{SCORES}::test_of_prompts",),
    ),
    Mutant(
        14,
        "prompt tokens are scored again when their rows are computed again",
        "speculation/requests.py",
        "PassEntry.of",
        "max(first, request.scored)",
        "first",
        (f"{SCORES}::test_of_prompts",),
    ),
    Mutant(
        15,
        "guesses behind the end of the answer leave log probabilities",
        "speculation/accept.py",
        "_verdict",
        "request_logprobs(judged, verdicts, number)[:kept]",
        "request_logprobs(judged, verdicts, number)",
        (EVERY_END,),
    ),
    Mutant(
        15,
        "log probabilities are read from rows of guesses that were not accepted",
        "acceptance/logprobs.py",
        "request_logprobs",
        "(root + 1 + node for node in verdicts.paths[request])",
        "(root + 1 + place for place in range(len(verdicts.paths[request])))",
        (f"{SCORES}::test_of_accepted_corrected_and_own_tokens",),
    ),
    Mutant(
        19,
        "a chunk that does not reach the prompt's end draws a token",
        "speculation/requests.py",
        "PassEntry.of",
        "first + run == length + pending",
        "True",
        (f"{SCORES}::test_of_accepted_corrected_and_own_tokens",),
    ),
    Mutant(
        20,
        "penalties count the committed tokens and not the draft's: the shapes differ",
        "acceptance/corrections.py",
        "touched_pairs",
        "np.concatenate([generated, np.ones(len(path_rows))])",
        "generated",
        (EVERY_END,),
    ),
    Mutant(
        20,
        "an error in a pass ends the engine",
        "speculation/recovery.py",
        "Recovery.resolve",
        "try:\n"
        "    if isinstance(in_flight.launched, Exception):\n"
        "        for entry in present:\n"
        "            entry.kv.end_pass()\n"
        "        raise in_flight.launched\n"
        "    return self.stepper.resolve(in_flight.launched)\n"
        "except Exception as error:\n"
        "    self._note('step', error)",
        "try:\n"
        "    if isinstance(in_flight.launched, Exception):\n"
        "        for entry in present:\n"
        "            entry.kv.end_pass()\n"
        "        raise in_flight.launched\n"
        "    return self.stepper.resolve(in_flight.launched)\n"
        "except ZeroDivisionError as error:\n"
        "    self._note('step', error)",
        (f"{ASYNC}::test_a_failing_pass_costs_the_request_and_not_the_engine",),
    ),
    Mutant(
        21,
        "of two stop texts in a block the one that begins first is taken",
        "engine/text.py",
        "_find_stop",
        "(begin + len(stop), begin) < best[:2]",
        "begin < best[1]",
        (TEXT, EVERY_END),
    ),
    Mutant(
        21,
        "of two stop texts in a block the one that is listed first is taken",
        "engine/text.py",
        "_find_stop",
        "best is None or (begin + len(stop), begin) < best[:2]",
        "best is None",
        (TEXT, EVERY_END),
    ),
    Mutant(
        25,
        "max_tokens beats an end at the same token",
        "engine/requests/answer.py",
        "AnswerState._find_end",
        "if token in self._limits.stop_ids:\n"
        "    return _End(count, 'stop', None if token in self._limits.eos_ids else token)",
        "if count == self.room:\n"
        "    return _End(count, 'length')\n"
        "if token in self._limits.stop_ids:\n"
        "    return _End(count, 'stop', None if token in self._limits.eos_ids else token)",
        (f"{UNIT}/engine/requests/test_request.py", f"{BLOCKS}::test_ends_that_meet"),
    ),
    Mutant(
        26,
        "a stop text is looked for at the end of a block's text only",
        "engine/text.py",
        "_find_stop",
        "window.find(stop, max(checked - len(stop) + 1, 0))",
        "len(window) - len(stop) if window.endswith(stop) else -1",
        (TEXT, EVERY_END),
    ),
    Mutant(
        26,
        "a stop text that began in an earlier token is not found",
        "engine/text.py",
        "_find_stop",
        "max(checked - len(stop) + 1, 0)",
        "checked",
        (TEXT, EVERY_END),
    ),
    Mutant(
        26,
        "too little text is held back",
        "engine/text.py",
        "_possible_beginning",
        "max((len(stop) for stop in stops)) - 1",
        "max((len(stop) for stop in stops)) - 2",
        (TEXT, EVERY_END),
    ),
    Mutant(
        34,
        "an answer of one token never ends",
        "engine/requests/answer.py",
        "AnswerState._find_end",
        "count == self.room",
        "1 < count == self.room",
        (f"{MANY}::test_one_token_takes_one_pass_and_no_more",),
    ),
    Mutant(
        34,
        "further answers wait for the rows of a first one that has ended with its first token",
        "engine/scheduling/scheduler.py",
        "_waits_for_leader",
        "leader is not None and leader.finish_reason is None and (leader.kv.computed < "
        "request.prompt_len - 1)",
        "leader is not None and leader.kv.computed < request.prompt_len - 1",
        (f"{MANY}::test_one_token_takes_one_pass_and_no_more",),
    ),
    Mutant(
        36,
        "an end inside an accepted block is ignored",
        "engine/requests/answer.py",
        "AnswerState._find_end",
        "token in self._limits.stop_ids",
        "token in self._limits.stop_ids and count == len(tokens)",
        (f"{UNIT}/engine/requests/test_request.py", EVERY_END),
    ),
)
