"""Proofs that acceptance keeps the target's distribution, as library code: tests and `foreword prove` run them."""
