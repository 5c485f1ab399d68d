"""Boundary communicators: rows between modules of different parallel layouts, every byte once."""
