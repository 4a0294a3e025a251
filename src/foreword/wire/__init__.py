"""The processes of the engine and of draft nodes, and the messages between API process and engine process."""
