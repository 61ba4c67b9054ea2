"""Generated from proto/octavo/v1; see proto/generate.py."""
