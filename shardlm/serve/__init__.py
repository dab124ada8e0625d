"""Serving: requests, scheduling, the engine and its HTTP interface."""
