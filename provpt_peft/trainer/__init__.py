"""Relocation inside the Hugging Face Trainer."""
