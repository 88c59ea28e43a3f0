"""Data: text to tokens to shards, a manifest with a fingerprint, and the stream that a run reads and resumes.

Import from the modules: ``prepare`` makes a data folder, ``manifest`` reads and verifies one, ``tokenizer`` holds its
tokenizer, ``shards`` reads its tokens, ``order`` and ``stream`` bring them to training. Nothing is imported here, so
that the worker processes of ``prepare`` need not load torch.
"""
