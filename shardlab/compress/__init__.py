"""Stages after training: a model directory in, a smaller one out, with figures of what it cost."""
