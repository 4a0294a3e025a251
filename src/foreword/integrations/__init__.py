"""Our drafters in other engines: transformers and vLLM."""
