"""KV memory of the CUDA backend: the reference's, with row moves in one kernel an array."""

from torch import Tensor

from foreword.backends.cuda.kernels.moves import move_rows
from foreword.backends.torch.kv_store import TorchKvStore


class CudaKvStore(TorchKvStore):
    """Keys and values of every kind on a GPU."""

    def move(self, copies: Tensor) -> None:
        """Copy rows (from, to) of all kinds, int32 [copies, 2] on the device; all are read before any is written."""
        if len(copies):
            for row in self.spec.rows:
                for memory in self.arrays(row.name):
                    move_rows(memory, copies)
