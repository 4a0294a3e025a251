"""Bringing a drafter to a cohort: shadow, verify, canary, on; and back at once if anything is wrong."""
