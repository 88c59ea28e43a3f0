"""A pretrained plain transformer becomes an architecture that feeds back, and at first computes the same logits."""
