from numpy import float32, float64, int64
from numpy.typing import NDArray

class Sampler:
    def __init__(self, threads: int) -> None: ...
    def floors(
        self,
        logits: NDArray[float32],
        temperature: NDArray[float64],
        top_k: NDArray[int64],
        top_p: NDArray[float64],
        min_p: NDArray[float64],
        peak: NDArray[float32],
        floor: NDArray[float32],
        first: NDArray[int64],
    ) -> None: ...
    def draw(
        self,
        logits: NDArray[float32],
        peak: NDArray[float32],
        floor: NDArray[float32],
        temperature: NDArray[float64],
        only: NDArray[int64],
        keys: NDArray[int64],
        tokens: NDArray[int64],
    ) -> None: ...
