"""Router: one address for several targets."""
