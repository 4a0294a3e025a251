"""`foreword prove --url`: what a stranger can find out about any server that speaks OpenAI's HTTP."""
