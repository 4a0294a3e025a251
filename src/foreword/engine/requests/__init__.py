"""A request from what the user asked to its books."""
