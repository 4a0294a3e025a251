"""Proofs that acceptance preserves the target's distribution, used by tests and `foreword prove`."""
