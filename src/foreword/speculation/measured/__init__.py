"""What was measured: acceptance and costs."""
