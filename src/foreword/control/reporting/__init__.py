"""Reports about the controller's state and decisions."""
