"""`foreword bench learn`: heads of a tiny model compared on prompts."""

from pathlib import Path

from foreword import LLM
from foreword.acceptance.params import SamplingParams
from foreword.bench.learning.heads import measure_heads
from foreword.drafters.config import SpeculationConfig
from helpers.taught_heads import hf_target, teach
from helpers.tiny_heads import TinyHead

LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


def test_a_head_that_knows_the_answers_has_more_tokens_per_pass(tiny_model: Path, tmp_path: Path):
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", speculation=None)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = {"known": ["what", "why"], "unknown": ["how so"]}
    heads = []
    for name in ("static", "learned"):
        head = TinyHead(360, draft_vocab=300).eagle3()
        if name == "learned":
            outputs = llm.generate(
                [{"prompt_token_ids": llm.encode(text)} for text in prompts["known"]], params
            )
            texts = [
                [*llm.encode(text), *output.outputs[0].token_ids]
                for text, output in zip(prompts["known"], outputs, strict=True)
            ]
            teach(head, hf_target(tiny_model), texts, (0, 1, 2))
        path = head.save(tmp_path / name, draft_vocab_size=300, **LAYERS)
        heads.append(SpeculationConfig.parse({"model": str(path), "num_speculative_tokens": 3}))
    llm.offer(heads)
    stages: list[str] = []
    show = lambda stage, *_: stages.append(stage)  # noqa: E731
    known, unknown = measure_heads(llm.engine, llm.encode, prompts, heads[0], heads[1], params, show)
    assert (known.kind, known.answers, known.same_texts) == ("known", 2, 2)
    assert known.learned > 1.5 > known.static >= 1.0
    assert known.ratio == known.learned / known.static
    assert (unknown.answers, unknown.same_texts) == (1, 1)
    assert stages == ["measuring known", "measuring unknown"]
    (plain, _) = measure_heads(llm.engine, llm.encode, prompts, None, heads[1], params, show)
    assert plain.static == 1.0, "without a head, every pass gives one token"
