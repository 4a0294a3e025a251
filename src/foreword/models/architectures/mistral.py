"""Mistral: Llama without biases, in its first versions with a sliding window. GGUF files call it llama."""

from foreword.models.architectures.architecture import Architecture, Window

MISTRAL = Architecture(name="mistral", hf_class="MistralForCausalLM", window=Window.ALL_LAYERS)
