"""Our drafters inside other engines: transformers and vLLM."""
