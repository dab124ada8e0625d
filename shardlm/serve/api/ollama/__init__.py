"""Ollama's interface (https://github.com/ollama/ollama/blob/main/docs/api.md), one file a concern: requests, their
translation to chats and completions, and lines of JSON as answers."""
