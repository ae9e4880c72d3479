"""Custom ops: contract, plain-torch reference and registration, one file each."""
