"""Which drafters an engine has, and what is known of them beforehand."""
