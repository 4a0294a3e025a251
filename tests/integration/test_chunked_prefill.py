"""While a long prompt is read in chunks, every pass serves everybody who runs."""

from foreword.acceptance.params import SamplingParams
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest

CHUNK = 32
LONG = 400


def test_every_pass_over_a_chunk_gives_each_running_answer_a_token(tiny_model):
    loaded = load_model(str(tiny_model))
    parts = EngineParts(EngineConfig(max_num_batched_tokens=CHUNK), build_drafter=loaded.build_drafter)
    core = EngineCore(loaded.decoder, loaded.vocabulary(), parts)
    others = {
        "plain": False,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
        "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    }
    for name, setting in others.items():
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
        core.add(NewRequest(name, (5, 6, 7, 5, 6, 7), params, speculation=setting))
    core.step()
    core.add(NewRequest("long", tuple(5 + i % 300 for i in range(LONG)), SamplingParams(max_tokens=1)))
    passes = 0
    while "long" not in (gained := {delta.request_id for delta in core.step()}):
        assert gained == set(others)
        passes += 1
    assert passes >= LONG // CHUNK
