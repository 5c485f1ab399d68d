"""Train only the MTP heads of a finished model, so that more of their drafts are accepted (docs/boost.md)."""
