"""Peak memory of an answer, in a process of its own."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.model, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

MIB = 1 << 20
ANSWER = """
from foreword import LLM, SamplingParams
from foreword.bench.peers import peak_resident_bytes

llm = LLM({arguments})
assert llm.engine.drafters.default_config is not None
(answer,) = llm.generate("Why is the sky blue?", SamplingParams(temperature=0, max_tokens=32))
print(len(answer.outputs[0].token_ids), peak_resident_bytes())
"""


@pytest.mark.parametrize(("arguments", "most"), [("", 400), ('dtype="int8"', 450)])
def test_the_default_model_with_its_head_fits(arguments: str, most: int):
    """By default it is as in its file or, on some processors, in int8."""
    code = ANSWER.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tokens, peak = map(int, done.stdout.split())
    assert tokens == 32
    assert peak <= most * MIB
