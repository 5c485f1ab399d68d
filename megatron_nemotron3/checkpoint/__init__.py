"""Megatron checkpoint folders: read without Megatron, verify, and resume from the last complete one.

files.py      files written atomically
folders.py    DIR/latest_checkpointed_iteration.txt and DIR/iter_*
opcodes.py    which operations a pickle may have
unpickle.py   pickles read without importing what they name
metadata.py   what a torch_dist folder holds: tensors, their chunks, objects
archive.py    the zip archive that holds one chunk
read.py       rows of a chunk or of a tensor, in bounded memory
tiling.py     do chunks fill a tensor exactly once
integrity.py  structural and full check of one folder
describe.py   what a folder is, in lines
resume.py     settle the tracker before a run starts
command.py    `nemotron3 check`

Only the standard library is imported; read.py needs torch when it is called.
"""
