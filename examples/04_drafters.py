"""The same text from different drafters, in different numbers of passes."""

import sys

from foreword import LLM, SamplingParams

llm = LLM(*sys.argv[1:2])
prompt = "Repeat after me: the quick brown fox jumps over the lazy dog."
params = SamplingParams(temperature=0, max_tokens=40)
texts = set()
for method in ("none", "ngram", "suffix", "jacobi"):
    # `fixed`: draft in every pass, whether or not drafting is measured to be faster
    speculation = (
        False if method == "none" else {"method": method, "num_speculative_tokens": 6, "fixed": True}
    )
    output = llm.generate(prompt, params, speculation=speculation)[0]
    texts.add(output.outputs[0].text)
    timings = output.timings
    print(f"{method:8} {timings.passes:3} passes, {timings.draft_n_accepted} draft tokens were accepted")
assert len(texts) == 1
