"""Roll-outs of drafters in the stages shadow, verify, canary and on, with a rollback if a guard is broken."""
