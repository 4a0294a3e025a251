"""Measures what `foreword serve --learn` gains after a shift of the traffic, and what it costs."""
