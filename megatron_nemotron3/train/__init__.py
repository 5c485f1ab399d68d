"""`nemotron3 train`: prepare text, run Megatron's training loop, report the losses.

command.py           the command and its options
training.py          the steps of a run, in the calling process
processes.py         start and follow the training processes
pretrain_script.py   what they run: a short form of the stock `pretrain_hybrid.py`
log.py, train/report.py    read Megatron's log; print and plot the losses
data/                text -> tokenizer and data set
"""
