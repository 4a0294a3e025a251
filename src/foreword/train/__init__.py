"""`foreword train`: trains heads and draft models on texts that the target writes."""
