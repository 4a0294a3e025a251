"""Communication between ranks: numbers are gathered, then added in rank order.

An all-reduce would choose its summation order by message size, so that a row's bits would depend on the rest of the
batch. Here every rank adds the same numbers in the same order.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from foreword.errors import EngineStopped

PASS_TIMEOUT = timedelta(minutes=5)
"""Time limit of an exchange. If the other ranks wait longer for a rank, they consider it dead."""


class PlannedExchange(NamedTuple):
    """One exchange of a pass, as every rank takes part in it."""

    shape: tuple[int, int]  # of each rank's tensor
    dtype: torch.dtype
    is_gathered_once: bool = False  # columns are gathered on the first rank; False: on all ranks


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the ranks' tensors, added in rank order in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


class RankExchange:
    """One rank's exchanges with the other ranks; counts those of the current pass."""

    def __init__(self, group: Any, rank: int, size: int) -> None:  # noqa: ANN401 - torch's process groups
        self.rank = rank
        self.size = size
        self._group = group
        self._done = 0

    def begin(self) -> None:
        """Begin a pass."""
        self._done = 0

    def total(self, part: Tensor) -> Tensor:
        return in_rank_order(self._gather(part))

    def mean(self, part: Tensor) -> Tensor:
        return self.total(part.sum(-1, keepdim=True)) / (part.shape[-1] * self.size)

    def gather_columns(self, part: Tensor) -> Tensor:
        """Return the columns of all ranks, concatenated, on the first rank; other ranks get only their own."""
        if not len(part):
            return part.new_empty((0, self.size * part.shape[1]))
        part = part.contiguous()
        gathered = [[torch.empty_like(part) for _ in range(self.size)]] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(lambda: self._group.gather(gathered, [part], options))
        return torch.cat(gathered[0], dim=1) if gathered else part

    def broadcast(self, numbers: Tensor) -> None:
        """Broadcast the first rank's tensor, before a pass."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait(lambda: self._group.broadcast([numbers], options))

    def finish(self, planned: Sequence[PlannedExchange], device: torch.device) -> None:
        """Complete the exchanges of a pass that failed on this rank, so that the other ranks can finish the pass.

        The other ranks receive NaN; the driver receives the failure. `planned` are all exchanges of the pass, in order.
        """
        try:
            for exchange in planned[self._done :]:
                not_computed = torch.full(exchange.shape, torch.nan, dtype=exchange.dtype, device=device)
                if exchange.is_gathered_once:
                    self.gather_columns(not_computed)
                else:
                    self._gather(not_computed)
        except BaseException as error:
            raise EngineStopped(
                f"the ranks of the model are out of step: {error}; start the engine again"
            ) from error

    def _gather(self, part: Tensor) -> list[Tensor]:
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [part]))
        return parts

    def _wait(self, collective: Any) -> None:  # noqa: ANN401
        try:
            collective().wait()
        except RuntimeError as error:
            raise EngineStopped(f"another rank is gone: {' '.join(str(error).split())[:200]}") from error
        self._done += 1


def join_group(device: torch.device, rank: int, size: int, rendezvous: str) -> RankExchange:
    """Join the other ranks through a shared file: NCCL on GPUs, otherwise gloo on loopback."""
    store = FileStore(rendezvous, size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = PASS_TIMEOUT
        return RankExchange(dist.ProcessGroupNCCL(store, rank, size, nccl), rank, size)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # loopback only
    gloo._timeout = PASS_TIMEOUT
    return RankExchange(dist.ProcessGroupGloo(store, rank, size, gloo), rank, size)
