"""Sharded checkpoints: every rank writes what it holds, and any mesh reads what it needs."""
