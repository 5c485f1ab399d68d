"""Launch scripts of every model and phase, which `nemotron3 recipe` lists, prints and copies."""
