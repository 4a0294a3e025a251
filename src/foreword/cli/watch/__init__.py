"""`foreword top` and `foreword advise`: the state of speculation on a server."""
