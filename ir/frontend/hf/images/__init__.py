"""Convolutional and hierarchical models of images, as tuples of layers. Outside, import `load.load_images`."""
