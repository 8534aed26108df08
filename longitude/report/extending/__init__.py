"""The report of `longitude extend`: tables, charts, a page and a summary, from rows alone."""
