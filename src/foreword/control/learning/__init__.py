"""What is believed of drafters, and how it is found out."""
