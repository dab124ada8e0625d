"""What the planner says, in three forms made from one structure: text, JSON and a page with pictures.

Two words are kept apart everywhere: a figure is *estimated* where formulas gave it and *compiled* where it was read
from the program that XLA made for these GPUs. A plan is *verified* where its program was compiled and fits.
"""
