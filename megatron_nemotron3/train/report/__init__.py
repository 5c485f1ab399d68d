"""`nemotron3 report`: one HTML file about a run.

command     options, and where the file goes
facts       what the run's folder says: model, versions, state, losses, checkpoints, warnings
figures     the plots, as SVG
page        the template of the page
"""
