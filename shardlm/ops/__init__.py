"""Pure functions on arrays. Each op has one readable reference; faster implementations are held to it."""
