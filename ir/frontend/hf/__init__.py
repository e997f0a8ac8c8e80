"""Import of Hugging Face folders."""
