"""Training: one loop, the command's and the user's."""
