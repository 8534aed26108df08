"""Past the window without touching positions: many windows at once, or a walk through a tree."""
