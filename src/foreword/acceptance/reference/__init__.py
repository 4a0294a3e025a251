"""Acceptance once more, slow and plain: one Python float at a time. Tests and `foreword prove` compare with it."""
