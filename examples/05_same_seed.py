"""A sampled text depends on its seed alone, not on draft tokens or on other requests in the same passes."""

import sys

from foreword import LLM, SamplingParams

llm = LLM(*sys.argv[1:2])
params = SamplingParams(temperature=0.9, seed=7, max_tokens=32)
alone = llm.generate("Once upon a time", params, speculation=False)[0].outputs[0].text
beside = llm.generate(["Once upon a time", "To be or not to be"], params, speculation={"method": "suffix"})
print(alone)
assert beside[0].outputs[0].text == alone
