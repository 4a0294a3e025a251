"""Reports about the state and the decisions of speculation."""
