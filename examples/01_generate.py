"""Answer two prompts, both in the same passes."""

import sys

from foreword import LLM, SamplingParams

llm = LLM(*sys.argv[1:2])
prompts = ["Name three primary colours.", "Explain in one sentence what a compiler does."]
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32)):
    print(output.outputs[0].text)
    print(f"  {output.timings.predicted_n} tokens in {output.timings.passes} passes")
