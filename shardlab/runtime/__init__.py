"""How ranks are started, watched and ended on one host, and what must be built and set before they start."""
