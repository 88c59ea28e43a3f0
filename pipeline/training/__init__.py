"""Training: the LightningModule and all around it."""
