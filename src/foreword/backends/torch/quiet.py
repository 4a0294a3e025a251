"""Suppresses a torch warning."""

import warnings


def hush_bfloat16() -> None:
    """Suppress torch's warning about a slower path on CPUs without bfloat16."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
