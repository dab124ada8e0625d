"""What the planner says of serving, in three forms made from one structure: text, JSON and a page with pictures, with
the words of plan/report."""
