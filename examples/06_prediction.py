"""Give the expected answer: an answer that follows it takes few passes."""

import sys

from foreword import LLM, SamplingParams

llm = LLM(*sys.argv[1:2])
params = SamplingParams(temperature=0, max_tokens=32)
prompt = "Fix the typo: The quikc brown fox jumps over the lazy dog."
plain = llm.generate(prompt, params, speculation=False)[0]
expected = plain.outputs[0].text
again = llm.generate(
    prompt, params, prediction=expected, speculation={"method": "prediction", "fixed": True}
)[0]
print(f"{plain.timings.passes} passes without a prediction, {again.timings.passes} with one")
assert again.outputs[0].text == expected
