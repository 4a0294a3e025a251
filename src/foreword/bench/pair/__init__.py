"""`foreword prove --pair`: how far a draft model is from its target, and what that is worth."""
