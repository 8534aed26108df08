"""The foundation: parts, regions, schemes and their text form, the result store, progress events.

Imports nothing from other folders but `parts` and `presets`, which register themselves here.
"""
