"""Declarations of model families. Formats and backends never test a family's name."""
