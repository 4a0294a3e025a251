"""Kernels are interpreted on a machine without a GPU: this is set before a benchmark imports them."""

import helpers.cuda  # noqa: F401
