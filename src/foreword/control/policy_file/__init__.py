"""The policy file: drafters, depth and service per cohort of requests."""
