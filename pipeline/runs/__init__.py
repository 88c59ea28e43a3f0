"""Run folders: what a run leaves on disk, and how it is found again. Knows nothing of Lightning."""
