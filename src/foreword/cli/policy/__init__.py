"""`foreword policy`: the operator's rules, checked and explained."""
