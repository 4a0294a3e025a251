"""How much each drafter helps, by kind of work, always relative to plain decoding in the same run."""
