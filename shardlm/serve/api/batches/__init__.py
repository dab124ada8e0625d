"""Files of requests in OpenAI's Batch format (https://platform.openai.com/docs/guides/batch), answered by the server's
own handlers in this process."""
