"""Boundary communicators: rows between modules of different parallel layouts, each row sent once."""
