"""`foreword top` and `foreword advise`: how guessing stands on a server."""
