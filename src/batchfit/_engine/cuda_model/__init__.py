"""cuda_model."""
