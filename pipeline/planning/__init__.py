"""What a run needs: memory of each rank, time, and settings that fit. Nothing is trained, and no data is read."""
