"""Roll-outs of drafters: shadow, verify, canary, on; and rollback on any problem."""
