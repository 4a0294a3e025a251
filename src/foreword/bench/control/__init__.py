"""What the controller is worth: against plain decoding and the best fixed setting, and when things change."""
