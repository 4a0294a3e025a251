"""The operator's rules: which requests get drafts, of which drafter, and how deep."""
