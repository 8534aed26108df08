"""An interactive page for comparing schemes."""
