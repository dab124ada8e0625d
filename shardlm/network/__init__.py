"""What a machine's devices and links really do: its links as the driver tells them, the mesh laid over its hosts, and
latency and bandwidth of collectives, memory and matmuls as measured. Who predicts from these figures is elsewhere."""
