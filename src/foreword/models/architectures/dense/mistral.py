"""Mistral: Llama without biases, in its first versions with a sliding window. GGUF files call it llama."""

from foreword.models.architectures.architecture import Architecture, Window, WindowedLayers

MISTRAL = Architecture(
    name="mistral",
    models="Mistral",
    hf_class="MistralForCausalLM",
    gguf_alias="llama",
    window=Window(WindowedLayers.ALL, listed=False),
)
