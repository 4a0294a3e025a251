"""The form that an answer must have: what users ask for, compiled grammars, and where an answer stands in one."""
