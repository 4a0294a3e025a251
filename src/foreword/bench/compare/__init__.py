"""`foreword bench compare`: ourselves beside other engines, on the same model, prompts and machine."""
