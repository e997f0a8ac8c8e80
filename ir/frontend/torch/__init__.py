"""Importer of torch.export programs. Enter by `importer.load_torch_export`; `export.is_exported_program` recognises them."""
