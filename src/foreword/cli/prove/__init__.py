"""`foreword prove`: exactness of this build, of a server, or of a pair of models."""
