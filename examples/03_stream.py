"""Stream a text: several tokens arrive at a time where draft tokens were accepted."""

import sys

from foreword import LLM, SamplingParams

llm = LLM(*sys.argv[1:2])
params = SamplingParams(temperature=0, max_tokens=48)
llm.generate("Count from 1 to 20.", params, on_text=lambda index, text: print(text, end="", flush=True))
print()
