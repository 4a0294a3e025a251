"""Which drafters an engine has, what they cost, and what is known of them beforehand."""
