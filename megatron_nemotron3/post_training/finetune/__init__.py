"""`nemotron3 finetune`: from a Hugging Face folder to a Hugging Face folder, on conversations."""

#: Schedule of the tiny models, which learn in minutes on a CPU; the last is the least of other models, too.
STEPS, LR, SEQ_LENGTH = 60, 1e-3, 512
