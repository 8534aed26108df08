"""The lab: its text, its tasks, its model and its runs."""
