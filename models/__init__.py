"""Model functions over parameter trees, and the files they come from."""
