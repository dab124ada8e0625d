"""Text to batches: corpus -> writer -> shards -> packing -> loader; `prepare` runs the first half, once."""
