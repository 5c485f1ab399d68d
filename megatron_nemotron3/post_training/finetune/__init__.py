"""`nemotron3 finetune`: from a Hugging Face folder to a Hugging Face folder, on conversations.

command     options, and the steps in their order
inputs      everything that is checked before the first step, and what of it a later start must find again
measure     held-out loss and a sample of one checkpoint

The schedule of a command of several steps, `nemotron3 boost` too, is in `post_training/schedule.py`.
"""
