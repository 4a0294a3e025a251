"""Foreword's drafts in transformers' assisted generation; needs a model as a Hugging Face directory or hub id."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from foreword.integrations.transformers import foreword_candidates

name = (*sys.argv[1:2], "HuggingFaceTB/SmolLM2-135M-Instruct")[0]
tokenizer, model = AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name)
inputs = tokenizer("one two three one two three one two", return_tensors="pt", return_token_type_ids=False)
with foreword_candidates(model, "suffix+ngram") as candidates:
    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=8)
print(tokenizer.decode(ids[0]))
print(f"{candidates.accepted} of {candidates.guessed} draft tokens were accepted")
