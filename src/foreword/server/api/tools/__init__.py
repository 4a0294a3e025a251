"""Tools that a model may call: how families of models write calls, and how calls are read from a growing answer."""
