"""What sets a family of models apart, one file each. Formats and backends test no family's name."""
