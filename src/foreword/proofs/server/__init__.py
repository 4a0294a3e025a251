"""`foreword prove --url`: black-box tests of any server with OpenAI's API."""
