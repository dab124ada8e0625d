"""The training wing: the step, the loop around it and what it does when something breaks."""
