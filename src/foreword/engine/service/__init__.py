"""Classes, priorities, shares and deadlines."""
