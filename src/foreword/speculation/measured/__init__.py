"""Measured acceptance rates and costs."""
