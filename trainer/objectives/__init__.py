"""What is trained: the masked autoencoder of the pretraining, and the distillation."""
