"""Draft nodes: drafters on other machines, and what the target needs to use them."""
