"""The foundation: parts, regions, schemes and their text form, the result store, progress events.

Imports nothing from the other folders except `parts`, which register themselves here.
"""
