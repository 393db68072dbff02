"""The tutorials, done as their readers do them."""
