"""How the chance of a false alarm is shared out.

Most checks compare texts that must be equal: on a correct server chance cannot refute them. Those below draw, and
the sum of their shares bounds the chance that a correct server is refuted at all (Bonferroni).
"""

FAMILY = 1e-4
OWN_LOGPROBS = 4e-5  # draws against the server's own log probabilities
WITHOUT_SPECULATION = 4e-5  # draws against draws without speculation
COPIES = 1e-5  # answers of one request that are equal by chance
