from foreword.cli.generate import effective


def test_greedy_decoding_names_no_parameter_without_effect():
    defaults = {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    assert effective(defaults, temperature=0) == {"repetition_penalty": 1.1}
    assert effective(defaults, temperature=0.2) == defaults
