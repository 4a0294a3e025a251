"""Backends that run a model, with one common interface."""

from foreword.backends.placements import offer_gpus

offer_gpus()
