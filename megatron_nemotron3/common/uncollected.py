"""Disables the garbage collector: the first import of the server that ranks are forked from.

A collection would walk through all that the server imports, and copy the memory that a fork shares. Ranks
leave it out of their collections (`gc.freeze`).
"""

import gc

gc.disable()
