"""Where the time of a program went on its devices: reads a profiler's trace and the program's text, and sums up."""
