"""The policy file: selects drafters, draft depth and service class for each cohort of requests."""
