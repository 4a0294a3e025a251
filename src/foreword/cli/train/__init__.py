"""`foreword train`."""
