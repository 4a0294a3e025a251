"""A conversation: the answer is part of the next question."""

import sys

from foreword import LLM, SamplingParams

llm = LLM(*sys.argv[1:2])
params = SamplingParams(temperature=0, max_tokens=24)
messages = [{"role": "user", "content": "What is a haiku?"}]
for question in ("Write one about rain.", "And one about snow."):
    answer = llm.chat(messages, params)[0].outputs[0].text
    print(f"> {messages[-1]['content']}\n{answer}\n")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
