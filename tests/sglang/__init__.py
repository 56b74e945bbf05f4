"""Tests with the real SGLang server: `make test-sglang`."""
