"""An adapter outside of training: its files, the Hub, its model card, pictures of it."""
