"""`foreword warm` where there is nothing to compile."""

import pytest
import torch

from foreword.cli.models import warm
from foreword.errors import RequestError


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match="needs a CUDA GPU"):
        warm("smollm2-135m")
