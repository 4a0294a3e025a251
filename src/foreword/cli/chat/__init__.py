"""`foreword chat`."""
