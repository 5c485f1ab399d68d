"""After pre-training: fine-tuning, distillation, MTP heads, smaller models."""
