"""Import of Hugging Face folders without transformers. Outside, import `folder.load_hf`, and the tables of `families`."""
