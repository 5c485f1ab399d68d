"""Pruning: what matters least in a model, and what is left without it (docs/compression.md).

sizes       the sizes that pruning changes, and the model that remains. Standard library only
importance  measured by hooks on a built model, in any layout
scores      the measurements of a model, in a file; and which parts stay
cut         the tensors that remain, as a view of a checkpoint: slices, in bounded memory
memory      prune, load and save a model that is whole in memory
calibrate, folder, command   `nemotron3 prune`
search, choose, budget       candidates under a budget (docs/search.md)
"""
