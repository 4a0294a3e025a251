"""An answer that must fit a schema."""

import json
import sys

from foreword import LLM, SamplingParams, StructuredOutputs

schema = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}
llm = LLM(*sys.argv[1:2])
form = StructuredOutputs(json=schema)
output = llm.generate("Describe a colour.", SamplingParams(max_tokens=64, seed=1, structured=form))[0]
print(json.loads(output.outputs[0].text))
