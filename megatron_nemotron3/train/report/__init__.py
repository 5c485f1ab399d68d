"""`nemotron3 report`: one HTML file about a run, which needs no other file and no network."""
