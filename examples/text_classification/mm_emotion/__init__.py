"""Classification of short texts in Chinese and English by six emotions."""
