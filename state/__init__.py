"""What is true: frozen dataclasses and the pure functions that turn one into the next."""
