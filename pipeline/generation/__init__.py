"""Generation: sampling from a trained model, token by token, with the caches that ``advance`` keeps."""
