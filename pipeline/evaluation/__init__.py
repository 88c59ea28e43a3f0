"""Evaluation: loss, perplexity and bits per byte."""
