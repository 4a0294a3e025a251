"""KV memory by the share of a GPU that may be used, on a pretend GPU."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foreword.engine.config import GIB, KV_BYTES, EngineConfig, memory_for_kv
from foreword.errors import RequestError
from helpers.passes import torch_decoder
from helpers.tiny_models import make_hf_model

TOTAL = 100 * GIB


class OnGpu:
    """A decoder that claims to be on a GPU, whose passes take 3 GiB."""

    def __init__(self, decoder: Any, allocated: list[int]) -> None:
        self._decoder, self._allocated = decoder, allocated
        self.device = torch.device("cuda")
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: Any, store: Any) -> Any:
        self.rows = len(batch.token_ids)
        self._allocated.append(self._allocated[-1] + 3 * GIB)
        return self._decoder.forward(batch, store)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    allocated = [20 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL - 20 * GIB, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated[-1])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: max(allocated))
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return OnGpu(torch_decoder(make_hf_model(tmp_path, "llama", tied=True)), allocated)


def test_kv_gets_what_weights_and_the_largest_pass_leave(target: OnGpu):
    assert memory_for_kv(target, 0.9, 48) == pytest.approx((90 - 20 - 3) * GIB, abs=GIB / 100)
    assert target.rows == 48


def test_what_is_asked_for_is_not_measured(target: OnGpu):
    assert EngineConfig(kv_cache_memory_bytes=1 << 20).fitted(target).kv_bytes == 1 << 20
    assert target.rows == 0
    assert EngineConfig().fitted(SimpleNamespace(device=torch.device("cpu"))).kv_bytes == KV_BYTES  # type: ignore[arg-type]


def test_a_model_that_leaves_nothing_is_refused(target: OnGpu):
    with pytest.raises(
        RequestError, match=r"no memory is left for KV: of 100\.0 GiB on the GPU 20\.0 are in use"
    ):
        EngineConfig(gpu_memory_utilization=0.2).fitted(target)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_that_is_none_is_refused(share: float):
    with pytest.raises(RequestError, match="gpu_memory_utilization must be above 0"):
        EngineConfig(gpu_memory_utilization=share)
