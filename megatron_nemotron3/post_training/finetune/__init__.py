"""`nemotron3 finetune`: from a Hugging Face folder to a Hugging Face folder, on conversations."""
