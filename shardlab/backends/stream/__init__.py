"""Training out of core: state in files, one segment of the model in memory at a time."""
