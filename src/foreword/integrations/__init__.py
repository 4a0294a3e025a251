"""Foreword's drafters in other engines: transformers and vLLM."""
