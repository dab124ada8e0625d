"""Plans of serving: what fits, how fast it decodes, and how many replicas a rate takes."""
