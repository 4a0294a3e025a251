"""Mistral: Llama without biases, in its first versions with a sliding window. GGUF files call it llama."""

from foreword.models.architectures.architecture import Architecture, Window, WindowedLayers

MISTRAL = Architecture(
    name="mistral", hf_class="MistralForCausalLM", window=Window(WindowedLayers.ALL, listed=False)
)
