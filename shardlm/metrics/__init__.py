"""What a run says about itself: its metrics, its live line, its goodput and its loss curve, a module each."""
