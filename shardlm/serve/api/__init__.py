"""The OpenAI-compatible HTTP server over the engine's `AsyncLLM`: `app.make_app` and `server.run`. No jax."""
