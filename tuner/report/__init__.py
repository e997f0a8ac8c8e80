"""Pictures of what tuning did, as one HTML file: from records, without measuring."""
