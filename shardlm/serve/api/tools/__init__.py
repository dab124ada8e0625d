"""Calls of tools in what a model writes, one file a style; `choose` names them."""
