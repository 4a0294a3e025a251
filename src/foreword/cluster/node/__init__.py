"""A draft node: an ordinary drafter behind a socket, for many targets."""
