"""Import of convolutional and hierarchical models of images from Hugging Face folders."""
