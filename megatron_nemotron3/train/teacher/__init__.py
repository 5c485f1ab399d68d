"""The teacher of a launch: its settings, and what is checked of it before a run. Needs no torch."""
