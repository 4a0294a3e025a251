"""What torch need not say."""

import warnings


def hush_bfloat16() -> None:
    """Torch tells of a slower path on CPUs without bfloat16 by a page of stack frames."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
