"""Architectures: one decoder, and a small file for each family that configures it."""
