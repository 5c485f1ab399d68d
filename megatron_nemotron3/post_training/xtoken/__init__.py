"""Distillation across tokenizers (X-Token): docs/xtoken.md.

tokens.py      a tokenizer's vocabulary as bytes
rules.py       which tokens of the teacher a token of the student stands for
projection.py  the sparse matrix of these weights, and its file
align.py       the teacher's tokens of a batch, and the spans that both tokenizers share
loss.py        P-KL and H-KL of each span, vocabulary- and context-parallel
command.py     `nemotron3 xtoken`
"""
