"""Code that runs a model: one package per backend, all with one interface."""

from foreword.backends.placements import offer_gpus

offer_gpus()
