"""Text and conversations, with images too, to batches: corpus -> writer -> shards -> packing -> loader; `prepare` runs
the first half, once."""
