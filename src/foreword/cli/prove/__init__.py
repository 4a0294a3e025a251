"""`foreword prove`: the promise, checked here, from outside, and for a pair of models."""
