"""`foreword train`: the target writes its own training set, and a head learns from it."""
