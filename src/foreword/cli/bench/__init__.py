"""`foreword bench`."""
