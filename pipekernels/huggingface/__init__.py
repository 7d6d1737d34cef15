"""Models of Hugging Face's libraries: plans, adapters, loading and saving, training, generation."""
