"""Where the blocks of a model family are, and how prompts enter them."""
